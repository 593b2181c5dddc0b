sqz_test(format_base_test base_test.cc file_test.cc LABELS unit LINK sqz_base)
sqz_test(format_index_test
  model_description_test.cc qmodel_file_test.cc safetensors_test.cc sqz_file_test.cc sqz_malformed_test.cc
  sqz_old_versions_test.cc sqz_publish_test.cc sqz_verify_test.cc
  LABELS unit LINK sqz_index_writer)
