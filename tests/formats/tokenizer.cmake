sqz_test(tokenizer_test tokenizer_test.cc tokenizer_malformed_test.cc tokenizer_parts_test.cc LABELS
             unit LINK sqz_tokenizer)
    set_target_properties(tokenizer_test PROPERTIES UNITY_BUILD ON)
        sqz_test(chat_format_test chat_format_test.cc LABELS unit LINK sqz_chat)
