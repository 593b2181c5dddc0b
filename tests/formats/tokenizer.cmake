sqz_test(tokenizer_test tokenizer_test.cc tokenizer_malformed_test.cc tokenizer_parts_test.cc
  LABELS unit LINK sqz_tokenizer)
set_target_properties(tokenizer_test PROPERTIES UNITY_BUILD ON)
if(NOT SQZ_SANITIZE)
  sqz_executable(tokenizer_bench ${PROJECT_SOURCE_DIR}/tests/bench/tokenizer_bench.cc
    LINK sqz_tokenizer)
endif()
sqz_test(chat_format_test chat_format_test.cc LABELS unit LINK sqz_chat)
