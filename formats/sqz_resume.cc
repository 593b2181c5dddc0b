#include "formats/sqz_resume.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "formats/base/hash.h"
#include "formats/json_fields.h"

namespace sqz {
namespace {

using Stored = std::array<uint64_t, 3>;  // a record and its hash

Stored stored(const LayerRecord& record) {
  const std::array<uint64_t, 2> both = {record.input, record.output};
  return {record.input, record.output, xxh3_64(std::as_bytes(std::span(both)))};
}

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

template <class T>
std::span<std::byte> bytes_of(T& value) {
  return std::as_writable_bytes(std::span(&value, 1));
}

}  // namespace

uint64_t ResumeFront::place(int64_t layer) const {
  return room_ - sizeof(Stored) * (records_.size() - static_cast<size_t>(layer));
}

// The settings; kCorrupt where there are none, or torn ones.
Result<std::string> ResumeFront::read_settings() const {
  uint64_t length = 0, hash = 0;
  SQZ_RETURN_IF_ERROR(before_->read(0, bytes_of(length)));
  std::string text(static_cast<size_t>(std::min(length, room_)), '\0');
  SQZ_RETURN_IF_ERROR(before_->read(sizeof(length), std::as_writable_bytes(std::span(text))));
  SQZ_RETURN_IF_ERROR(before_->read(sizeof(length) + text.size(), bytes_of(hash)));
  if (hash == xxh3_64(bytes_of(std::as_const(text)))) return text;
  return Status(Code::kCorrupt, before_->path() + ": torn");
}

Status ResumeFront::read_records() {
  for (int64_t l = 0; l < std::ssize(records_); ++l) {
    Stored entry{};
    const Status status = before_->read(place(l), bytes_of(entry));
    if (status.code() == Code::kCorrupt) continue;  // the file ends before
    SQZ_RETURN_IF_ERROR(status);
    const LayerRecord record{entry[0], entry[1]};
    if (stored(record) == entry) records_[static_cast<size_t>(l)] = record;
  }
  return {};
}

Result<std::unique_ptr<ResumeFront>> ResumeFront::open(Env& env, AtomicFile& file, bool replace,
                                                       const JsonMembers& settings, uint64_t room,
                                                       size_t layers) {
  std::unique_ptr<ResumeFront> front(new ResumeFront);
  const std::string path = file.temporary_path();
  const std::string text = JsonText(settings).str();
  front->room_ = room;
  front->records_.resize(layers);
  SQZ_ASSIGN_OR_RETURN(front->before_, env.open_read(path));
  const auto found = front->read_settings();
  if (found.ok()) {
    SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json_object(*found, path));
    const Status same = check_settings(json.root(), settings, path);
    if (same.ok()) {
      SQZ_RETURN_IF_ERROR(front->read_records());
      return front;
    }
    if (!replace) return same;
  } else if (found.status().code() != Code::kCorrupt) {
    return found.status();
  }
  const uint64_t length = text.size(), hash = xxh3_64(bytes_of(text));
  if (2 * sizeof(length) + length > front->place(0)) {
    return Refuse{path, Code::kInternal}("settings", concat(length, " bytes"), "a shorter text");
  }
  SQZ_RETURN_IF_ERROR(file.restart());
  SQZ_ASSIGN_OR_RETURN(front->before_, env.open_read(path));
  std::string start(2 * sizeof(length) + text.size(), '\0');
  std::memcpy(start.data(), &length, sizeof(length));
  std::memcpy(start.data() + sizeof(length), text.data(), text.size());
  std::memcpy(start.data() + sizeof(length) + text.size(), &hash, sizeof(hash));
  SQZ_RETURN_IF_ERROR(file.file().write(0, bytes_of(std::as_const(start))));
  return front;
}

const LayerRecord* ResumeFront::find(int64_t layer, uint64_t input) const {
  const LayerRecord& record = records_[static_cast<size_t>(layer)];
  return record.input == input && record.output != 0 ? &record : nullptr;
}

Status ResumeFront::record(AtomicFile& file, int64_t layer, const LayerRecord& record) {
  const Stored entry = stored(record);
  SQZ_RETURN_IF_ERROR(file.file().write(place(layer), std::as_bytes(std::span(entry))));
  file.keep();
  return {};
}

}  // namespace sqz
