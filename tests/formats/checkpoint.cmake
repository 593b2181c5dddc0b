sqz_test(checkpoint_test checkpoint_test.cc model_config_test.cc LINK sqz_checkpoint)
