sqz_test(format_base_test base_test.cc LABELS unit LINK sqz_base)
sqz_test(format_file_test file_test.cc LABELS unit LINK sqz_base)
# Two thirds of their compilation are headers. A batch is four files, in this order.
sqz_test(format_index_test
  model_description_test.cc sqz_malformed_test.cc sqz_verify_test.cc
  qmodel_file_test.cc sqz_publish_test.cc
  safetensors_test.cc sqz_file_test.cc sqz_old_versions_test.cc
  LABELS unit LINK sqz_index_writer)
set_target_properties(format_index_test PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 4)
