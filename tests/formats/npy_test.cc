#include "formats/npy.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>

#include "tests/common/npy_file.h"
#include "tests/common/temporary_directory.h"
#include "tests/formats/raw_safetensors.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class NpyTest : public ::testing::Test {
 protected:
  void write(const std::string& bytes) { testing::write_file(path_, bytes); }

  template <class T>
  static std::string data(std::initializer_list<T> values) {
    std::string out;
    for (const T value : values) {
      out.append(reinterpret_cast<const char*>(&value), sizeof(T));
    }
    return out;
  }

  static std::string file(int version, const std::string& header, const std::string& payload) {
    std::string out = "\x93NUMPY";
    out += static_cast<char>(version);
    out += '\0';
    for (int i = 0; i < (version == 1 ? 2 : 4); ++i) {
      out += static_cast<char>(header.size() >> (8 * i) & 0xff);
    }
    return out + header + payload;
  }

  static std::string header(const std::string& descr, const std::string& shape) {
    return concat("{'descr': '", descr, "', 'fortran_order': False, 'shape': ", shape, ", }   \n");
  }

  Result<std::vector<int32_t>> read() { return read_npy_tokens(Env::posix(), path_); }

  testing::TemporaryDirectory folder_;
  const std::string path_ = folder_.file("tokens.npy");
};

TEST_F(NpyTest, ReadsEveryIntegerTypeAndVersion) {
  write(file(1, header("<i4", "(3,)"), data<int32_t>({0, 7, 2147483647})));
  EXPECT_THAT(read().value(), ElementsAre(0, 7, 2147483647));
  write(file(2, header("<i8", "(2,)"), data<int64_t>({1, 8191})));
  EXPECT_THAT(read().value(), ElementsAre(1, 8191));
  write(file(3, header("<u2", "(2,)"), data<uint16_t>({65535, 3})));
  EXPECT_THAT(read().value(), ElementsAre(65535, 3));
  write(file(1, header("<u4", "(1,)"), data<uint32_t>({2147483647})));
  EXPECT_THAT(read().value(), ElementsAre(2147483647));
  write(file(1, "{'shape': (0,), \"descr\": \"<i4\", 'fortran_order': False}", ""));
  EXPECT_THAT(read().value(), ElementsAre());
}

TEST_F(NpyTest, ReadsMoreThanOneBlock) {
  std::string payload;
  for (int32_t i = 0; i < 50000; ++i) payload += data<int32_t>({i});
  write(file(1, header("<i4", "(50000,)"), payload));
  const auto ids = read().value();
  ASSERT_EQ(ids.size(), 50000u);
  for (int32_t i = 0; i < 50000; ++i) ASSERT_EQ(ids[static_cast<size_t>(i)], i);
}

TEST_F(NpyTest, RefusesWhatItCannotRead) {
  const auto i4 = [](const char* shape, const std::string& payload) {
    return file(1, header("<i4", shape), payload);
  };
  const std::string good = i4("(1,)", data<int32_t>({1}));
  std::string huge = good;
  huge[6] = 2;  // version 2: the length is 32 bits wide
  huge[10] = huge[11] = '\x7f';
  const Code corrupt = Code::kCorrupt, unsupported = Code::kUnsupported;
  for (const auto& [bytes, code, field] : {
           std::tuple(std::string(), corrupt, "first bytes"),
           {"PK\3\4 a zip archive", corrupt, "first bytes"},
           {file(4, header("<i4", "(0,)"), ""), unsupported, "version"},
           {good.substr(0, 40), corrupt, "header length"},
           {huge, corrupt, "header length"},
           {file(1, "[1, 2]", ""), corrupt, "descr"},
           {file(1, "{'descr': '<i4', 'shape': (0,)}", ""), corrupt, "fortran_order"},
           {i4("(99999999999999999999,)", ""), unsupported, "shape"},
           {file(1, header(">i4", "(1,)"), "1234"), unsupported, "descr"},
           {i4("(1, 1)", "1234"), unsupported, "shape"},
           {file(1, "{'descr': '<i4', 'fortran_order': True, 'shape': (1,)}", "1234"), unsupported,
            "fortran_order"},
           {i4("(2,)", "1234"), corrupt, "shape"},
           {i4("(1,)", "12345"), corrupt, "shape"},
           {i4("(-1,)", "1234"), corrupt, "shape"},
           {i4("(4611686018427387904,)", ""), corrupt, "shape"},  // times 4 wraps to 0 bytes
           {i4("(2,)", data<int32_t>({1, -1})), corrupt, "item 1"},
           {file(1, header("<i8", "(1,)"), data<int64_t>({int64_t{1} << 31})), corrupt, "item 0"},
           {file(1, header("<u4", "(1,)"), data<uint32_t>({4294967295u})), corrupt, "item 0"},
       }) {
    write(bytes);
    const Status status = read().status();
    EXPECT_EQ(status.code(), code) << status.message();
    EXPECT_THAT(status.message(), ::testing::AllOf(HasSubstr(path_), HasSubstr(field)));
  }
}

}  // namespace
}  // namespace sqz
