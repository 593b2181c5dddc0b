sqz_test(format_base_test base_test.cc LINK sqz_base)
sqz_test(format_index_test
  model_description_test.cc safetensors_test.cc
  LINK sqz_index_format)
