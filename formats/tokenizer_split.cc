#include <algorithm>

#include "formats/pretokenizer.h"

namespace sqz {

// Matches and what lies between them, in order, covering all of `text`.
Status Splitter::find_parts(std::string_view text) {
  parts_.clear();
  matcher_.reset(text);
  size_t covered = 0;
  while (true) {
    SQZ_ASSIGN_OR_RETURN(const std::optional<Span> match, matcher_.next());
    if (!match) break;
    if (covered != match->begin) parts_.push_back({covered, match->begin, rule_.invert});
    parts_.push_back({match->begin, match->end, !rule_.invert});
    covered = match->end;
  }
  if (covered != text.size()) parts_.push_back({covered, text.size(), rule_.invert});
  return {};
}

// Joins each part for which `join(is a match, previous is one)` holds with the part before it.
template <class Join>
void Splitter::merge_parts(Join join) {
  size_t count = 0;
  bool previous = false;
  for (const Part& part : parts_) {
    if (count > 0 && join(part.match, previous)) {
      parts_[count - 1].end = part.end;
    } else {
      parts_[count++] = part;
    }
    previous = part.match;
  }
  parts_.resize(count);
}

// As above, from the end: a match joins the part behind it.
void Splitter::merge_with_next() {
  std::vector<Part> merged;
  bool previous = false;
  for (auto it = parts_.rbegin(); it != parts_.rend(); ++it) {
    if (it->match && !previous && !merged.empty()) {
      merged.back().begin = it->begin;
    } else {
      merged.push_back(*it);
    }
    previous = it->match;
  }
  parts_.assign(merged.rbegin(), merged.rend());
}

Status Splitter::split(const Piece& piece, std::vector<Piece>& out) {
  SQZ_RETURN_IF_ERROR(find_parts(piece.text));
  switch (rule_.behavior) {
    case SplitBehavior::kIsolated:
      break;
    case SplitBehavior::kRemoved:
      std::erase_if(parts_, [](const Part& part) { return part.match; });
      break;
    case SplitBehavior::kMergedWithPrevious:
      merge_parts([](bool match, bool previous) { return match && !previous; });
      break;
    case SplitBehavior::kMergedWithNext:
      merge_with_next();
      break;
    case SplitBehavior::kContiguous:
      merge_parts([](bool match, bool previous) { return match == previous; });
      break;
  }
  for (const Part& part : parts_) {
    if (part.begin == part.end) continue;
    out.push_back({piece.text.substr(part.begin, part.end - part.begin), -1,
                   piece.at_start && part.begin == 0});
  }
  return {};
}

}  // namespace sqz
