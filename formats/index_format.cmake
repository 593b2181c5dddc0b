# safetensors, the model description and the .sqz file: what libruntime needs of formats/.
sqz_library(sqz_index_format
  coded_rows.cc json_fields.cc layers_file.cc metadata_strings.cc model_description.cc
  qmodel_file.cc safetensors.cc sqz_calibration.cc sqz_checksums.cc sqz_container.cc sqz_file.cc sqz_layout.cc sqz_metadata.cc
  sqz_resume.cc sqz_verify.cc sqz_writer.cc
  LINK sqz_base Threads::Threads)
target_compile_definitions(sqz_index_format PRIVATE SQZ_VERSION="${PROJECT_VERSION}")
