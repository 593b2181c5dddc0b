sqz_test(capture_test capture_test.cc LABELS unit LINK sqz_capture)
