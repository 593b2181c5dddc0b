# sqz_npy: token ids in NumPy files. sqz_capture: the only user of HDF5.
sqz_library(sqz_npy npy.cc LINK sqz_base)
sqz_library(sqz_capture capture.cc capture_writer.cc hdf5.cc LINK sqz_index_format)
target_include_directories(sqz_capture SYSTEM PRIVATE ${HDF5_C_INCLUDE_DIRS})
target_link_libraries(sqz_capture PRIVATE ${HDF5_C_LIBRARIES})
