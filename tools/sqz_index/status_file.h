// What became of the documents of a shard, a JSON object a line, in a file that grows from run to
// run.
#pragma once

#include <memory>
#include <string>

#include "formats/base/json.h"
#include "formats/base/status.h"
#include "tools/sqz_index/manifest.h"

namespace sqz {

class StatusFile {
 public:
  // FOLDER/shard-I-of-N.jsonl, made if it is not there. A line that a killed process has left torn
  // is ended first.
  static Result<std::unique_ptr<StatusFile>> open(const std::string& folder, const Shard& shard);
  ~StatusFile();
  StatusFile(const StatusFile&) = delete;
  StatusFile& operator=(const StatusFile&) = delete;

  // Adds the fields and `time`, in seconds since 1970, in one write: other processes may add lines
  // to the same file.
  Status add(JsonMembers fields);

 private:
  StatusFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}

  const std::string path_;
  const int fd_;
};

}  // namespace sqz
