# safetensors, the model description and the .sqz file: what libruntime needs of formats/.
sqz_library(sqz_index_format
  safetensors.cc json_fields.cc model_description.cc
  LINK sqz_base)
