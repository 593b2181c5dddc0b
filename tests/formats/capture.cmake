sqz_test(npy_test npy_test.cc LABELS unit LINK sqz_npy)
sqz_test(capture_test capture_test.cc LABELS unit LINK sqz_capture ${HDF5_C_LIBRARIES})
target_include_directories(capture_test SYSTEM PRIVATE ${HDF5_C_INCLUDE_DIRS})
