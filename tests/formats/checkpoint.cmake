sqz_test(checkpoint_test checkpoint_test.cc model_config_test.cc LABELS unit LINK sqz_checkpoint)
