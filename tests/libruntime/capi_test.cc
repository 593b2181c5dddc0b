// The C ABI as a host meets it, through libsqz.so: indexes, structs of other versions, messages.
#include <cstddef>
#include <cstring>
#include <thread>

#include "libruntime/capi/handles.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/libruntime/c_index.h"

extern "C" int sqz_header_is_c99(void);

namespace sqz {
namespace {

using runtime::make;
using testing::CApi;

TEST_F(CApi, HeaderIsC99) {
  EXPECT_EQ(sqz_header_is_c99(), 1);
}

TEST_F(CApi, LayersThatAreNotThere) {
  sqz_layer_info info = make<sqz_layer_info>();
  EXPECT_EQ(sqz_index_describe_layer(index_->handle(), 1, &info), SQZ_OK);
  for (const int64_t layer : {-1, 2}) {
    EXPECT_EQ(sqz_index_describe_layer(index_->handle(), layer, &info), SQZ_INVALID_ARGUMENT);
    EXPECT_STREQ(sqz_last_error(), concat("layer: found ", layer, ", expected 0 to 1").c_str());
  }
  const char* name = nullptr;
  sqz_tensor view = {};
  EXPECT_EQ(sqz_index_state(index_->handle(), 1, 0, &name, &view), SQZ_INVALID_ARGUMENT);  // none
  EXPECT_EQ(sqz_index_state(index_->handle(), 2, 0, &name, &view), SQZ_INVALID_ARGUMENT);
}

// A context can have an offset if each of its layers holds all tokens, turned by a known RoPE.
TEST(Composes, OnlyWholeContextsDo) {
  using Change = void (*)(IndexMetadata&);
  const std::pair<Change, bool> cases[] = {
      {[](IndexMetadata&) {}, true},
      {[](auto& m) { m.model.rope.kind = RopeDescription::Kind::kOther; }, false},
      {[](auto& m) { m.state.emplace_back(); }, false},
      {[](auto& m) {
         m.model.sliding_window = {0, 300};
       },
       false},
      {[](auto& m) {
         m.model.geometry = {{.head_dim = 16}, {.kind = LayerKind::kNone}};
       },
       true},
      {[](auto& m) {
         m.model.geometry = {{.head_dim = 8}, {.kind = LayerKind::kNone}};
       },
       false},
      {[](auto& m) {
         m.model.geometry = {{.head_dim = 16}, {.kind = LayerKind::kState}};
       },
       false}};
  for (const auto& [change, composes] : cases) {
    IndexMetadata metadata;
    metadata.model.layers = 2;
    metadata.model.head_dim = 16;
    change(metadata);
    EXPECT_EQ(capi::composes(metadata), composes) << "case " << (&change - &cases[0].first) / 2;
  }
}

TEST_F(CApi, VerifyWhileOpening) {
  const std::string file = directory_->file("flipped.sqz");
  testing::RawIndex raw = testing::RawIndex::read(path());
  testing::write_file(file, raw.bytes());
  const runtime::Index whole(file, SQZ_OPEN_VERIFY);
  raw.at("layers.0.keys").data[7] ^= 1;
  testing::write_file(file, raw.bytes());
  const runtime::Index unchecked(file, SQZ_OPEN_READ);
  sqz_index* index = nullptr;
  EXPECT_EQ(sqz_index_open(file.c_str(), SQZ_OPEN_VERIFY, &index), SQZ_CORRUPT);
  EXPECT_EQ(index, nullptr);
  const std::string said = sqz_last_error();
  EXPECT_TRUE(said.starts_with(file + ": tensor \"layers.0.keys\"")) << said;
  EXPECT_EQ(sqz_index_verify(unchecked.handle()), SQZ_CORRUPT);
  EXPECT_EQ(sqz_last_error(), said);
}

TEST_F(CApi, OpenErrors) {
  const volatile int three = 3;  // C callers can pass anything
  sqz_index* index = reinterpret_cast<sqz_index*>(8);
  EXPECT_EQ(sqz_index_open("/nowhere/x.sqz", SQZ_OPEN_MMAP, &index), SQZ_NOT_FOUND);
  EXPECT_EQ(index, nullptr) << "a failed open must not leave a wild handle";
  EXPECT_NE(std::strstr(sqz_last_error(), "/nowhere/x.sqz"), nullptr);
  EXPECT_EQ(sqz_index_open(nullptr, SQZ_OPEN_MMAP, &index), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_open(path().c_str(), SQZ_OPEN_MMAP, nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_open(path().c_str(), static_cast<sqz_open_mode>(three), &index),
            SQZ_INVALID_ARGUMENT);
  const std::string text = directory_->file("text");
  FILE* file = std::fopen(text.c_str(), "w");
  std::fputs("this is not an index, whatever its name", file);
  std::fclose(file);
  EXPECT_EQ(sqz_index_open(text.c_str(), SQZ_OPEN_READ, &index), SQZ_CORRUPT);
  EXPECT_EQ(sqz_index_describe(nullptr, nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_describe(index_->handle(), nullptr), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_verify(nullptr), SQZ_INVALID_ARGUMENT);
  sqz_index_close(nullptr);
  sqz_session_destroy(nullptr);
}

TEST_F(CApi, LastErrorBelongsToTheThread) {
  EXPECT_EQ(sqz_index_verify(nullptr), SQZ_INVALID_ARGUMENT);
  const std::string mine = sqz_last_error();
  EXPECT_FALSE(mine.empty());
  std::thread([] {
    EXPECT_STREQ(sqz_last_error(), "");
    EXPECT_EQ(sqz_index_open("/other", SQZ_OPEN_MMAP, nullptr), SQZ_INVALID_ARGUMENT);
  }).join();
  EXPECT_EQ(sqz_last_error(), mine);
  EXPECT_STREQ(sqz_status_string(SQZ_OK), "ok");
  EXPECT_NE(sqz_status_string(static_cast<sqz_status>(15)), nullptr);
}

TEST_F(CApi, UploadSaysWhyItCannot) {
  auto options = make<sqz_upload_options>();
  options.device_id = 1000;
  EXPECT_EQ(sqz_index_upload(nullptr, &options), SQZ_INVALID_ARGUMENT);
  // No GPU of this number, no GPU at all, or no CUDA in this library.
  EXPECT_EQ(sqz_index_upload(index_->handle(), &options), SQZ_UNSUPPORTED);
  EXPECT_NE(std::strstr(sqz_last_error(), "device_type 2 (CUDA): "), nullptr) << sqz_last_error();
  options.threads = 257;
  EXPECT_EQ(sqz_index_upload(index_->handle(), &options), SQZ_INVALID_ARGUMENT);
  options.struct_size = 0;
  EXPECT_EQ(sqz_index_upload(index_->handle(), &options), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_unload(nullptr, 0), SQZ_INVALID_ARGUMENT);
  EXPECT_EQ(sqz_index_unload(index_->handle(), 0), SQZ_INVALID_ARGUMENT);
}

// Damaged offsets are not found at open (that reads the header alone) but before they are used.
TEST_F(CApi, DamagedOffsetsAreRefusedAtSessionCreation) {
  const testing::RawIndex whole = testing::RawIndex::read(path());
  const std::string file = directory_->file("damaged.sqz");
  for (const auto& [level, entries] : {std::pair(1, 51), {2, 251}}) {  // of each of two heads
    for (const int entry : {0, 7, entries - 1, 2 * entries - 1}) {
      for (const uint32_t value : {uint32_t{0xffffffff}, uint32_t{4885}, uint32_t{1}}) {
        testing::RawIndex damaged = whole;
        damaged.set_number(concat("layers.0.level.", level, ".offsets"), entry, value);
        testing::write_file(file, damaged.bytes());
        const runtime::Index index(file);
        const auto options = runtime::options_for_budget(0.2);
        sqz_session* session = nullptr;
        EXPECT_EQ(sqz_session_create(index.handle(), &options, &session), SQZ_CORRUPT)
            << "level " << level << " entry " << entry << " value " << value;
        EXPECT_NE(std::strstr(sqz_last_error(), "offsets"), nullptr) << sqz_last_error();
        EXPECT_EQ(sqz_index_verify(index.handle()), SQZ_CORRUPT);
      }
    }
  }
}

TEST_F(CApi, OlderAndNewerStructs) {
  auto options = runtime::options_for_budget(0.125);
  options.threads = 1 << 20;  // refused if it is read
  EXPECT_EQ(create(options), SQZ_INVALID_ARGUMENT);
  options.struct_size = offsetof(sqz_session_options, threads);
  EXPECT_EQ(create(options), SQZ_OK) << sqz_last_error();

  struct Newer {
    sqz_session_options known;
    uint64_t unknown;
  } newer = {runtime::options_for_budget(0.125), 0};
  newer.known.struct_size = sizeof(newer);
  EXPECT_EQ(create(newer.known), SQZ_OK) << sqz_last_error();
  newer.unknown = 1;
  EXPECT_EQ(create(newer.known), SQZ_UNSUPPORTED);

  // Results fill what the caller has, and no more.
  unsigned char room[sizeof(sqz_index_info) + 16];
  std::memset(room, 0xee, sizeof(room));
  auto* info = reinterpret_cast<sqz_index_info*>(room);
  info->struct_size = offsetof(sqz_index_info, sink);
  EXPECT_EQ(sqz_index_describe(index_->handle(), info), SQZ_OK);
  EXPECT_EQ(info->tokens, 5000);
  EXPECT_EQ(room[offsetof(sqz_index_info, sink)], 0xee);
  info->struct_size = sizeof(room);
  EXPECT_EQ(sqz_index_describe(index_->handle(), info), SQZ_OK);
  EXPECT_EQ(info->sink, 16);
  EXPECT_EQ(info->struct_size, sizeof(room));
  EXPECT_EQ(room[sizeof(room) - 1], 0);
}

TEST_F(CApi, StructSizesOfNoVersionAreRefused) {
  auto info = make<sqz_index_info>();
  info.struct_size = 0xcdcdcdcd;  // as memory is that nobody set
  EXPECT_EQ(sqz_index_describe(index_->handle(), &info), SQZ_INVALID_ARGUMENT);
  EXPECT_NE(std::strstr(sqz_last_error(), "struct_size"), nullptr);
  auto options = testing::held_budget(0.2);
  options.struct_size = 1u << 30;
  EXPECT_EQ(create(options), SQZ_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace sqz
