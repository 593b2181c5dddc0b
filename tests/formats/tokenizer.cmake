sqz_test(tokenizer_test tokenizer_test.cc tokenizer_malformed_test.cc tokenizer_parts_test.cc
  LABELS unit LINK sqz_tokenizer)
