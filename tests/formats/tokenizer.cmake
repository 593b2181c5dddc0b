sqz_executable(tokenizer_bench ${PROJECT_SOURCE_DIR}/tests/bench/tokenizer_bench.cc
  LINK sqz_tokenizer)
