# Hugging Face checkpoint directories: config.json and safetensors.
sqz_library(sqz_checkpoint
  checkpoint.cc model_config.cc required_tensors.cc rope_config.cc
  LINK sqz_index_format)
