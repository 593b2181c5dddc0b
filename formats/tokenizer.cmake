# sqz_tokenizer: tokenizer.json and SentencePiece models. PCRE2 runs the split patterns, utf8proc
# normalises.
sqz_library(sqz_tokenizer
  bpe.cc bpe_parse.cc bpe_scores.cc byte_trie.cc pretokenizer.cc
  sentencepiece_model.cc sentencepiece_normalizer.cc sentencepiece_unigram.cc tokenizer.cc
  tokenizer_added.cc tokenizer_byte_level.cc tokenizer_decoder.cc tokenizer_fields.cc
  tokenizer_json.cc tokenizer_normalizer.cc tokenizer_pattern.cc tokenizer_post_processor.cc
  tokenizer_regex.cc tokenizer_sentencepiece.cc tokenizer_unicode.cc utf8.cc
  LINK sqz_base PkgConfig::PCRE2 PkgConfig::UTF8PROC)
# sqz_chat: the turns of a chat around context and question.
sqz_library(sqz_chat chat_format.cc LINK sqz_index_format sqz_tokenizer)
