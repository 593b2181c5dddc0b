// A strict reader of the XML that the tools write: every tag closed, attributes quoted and given
// once, no entity but the five that need no declaration. What it refuses fails the test.
#pragma once

#include <gtest/gtest.h>

#include <cctype>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/status.h"
#include "formats/utf8.h"

namespace sqz::testing {

struct XmlElement {
  std::string name, text;  // text: of this element alone, entities resolved
  std::map<std::string, std::string> attributes;
  std::vector<XmlElement> children;

  // This element and all below it that have this name, in document order.
  std::vector<const XmlElement*> all(std::string_view wanted) const {
    std::vector<const XmlElement*> out;
    if (name == wanted) out.push_back(this);
    for (const XmlElement& child : children) {
      for (const XmlElement* found : child.all(wanted)) out.push_back(found);
    }
    return out;
  }
  double number(const std::string& attribute) const {
    const auto at = attributes.find(attribute);
    EXPECT_NE(at, attributes.end()) << name << " without " << attribute;
    return at == attributes.end() ? 0 : std::stod(at->second);
  }
};

class XmlReader {
 public:
  explicit XmlReader(std::string_view text) : text_(text) {}

  XmlElement document() {
    EXPECT_FALSE(find_invalid_utf8(text_).has_value());
    for (const char c : text_) {
      if (static_cast<unsigned char>(c) < 0x20 && c != '\n' && c != '\t') fail("control character");
    }
    if (take("<!DOCTYPE html>")) spaces();
    XmlElement root = element();
    spaces();
    if (at_ != text_.size()) fail("text after the root");
    return root;
  }

 private:
  XmlElement element() {
    XmlElement out;
    if (!take("<")) fail("<");
    out.name = name();
    while (!failed_) {
      const bool space = spaces();
      if (take("/>")) return out;
      if (take(">")) break;
      if (!space) fail("a space before an attribute");
      const std::string key = name();
      if (!take("=\"")) fail("=\"");
      const size_t begin = at_;
      while (at_ < text_.size() && text_[at_] != '"' && text_[at_] != '<') ++at_;
      const std::string value = resolved(text_.substr(begin, at_ - begin));
      if (!take("\"")) fail("\" at the end of an attribute");
      if (!out.attributes.emplace(key, value).second) fail("an attribute given twice");
    }
    while (!failed_) {
      const size_t begin = at_;
      while (at_ < text_.size() && text_[at_] != '<') ++at_;
      out.text += resolved(text_.substr(begin, at_ - begin));
      if (take("</")) {
        if (name() != out.name || !take(">")) fail("</" + out.name + ">");
        return out;
      }
      if (at_ == text_.size()) {
        fail("the end of " + out.name);
      } else {
        out.children.push_back(element());
      }
    }
    return out;
  }

  std::string resolved(std::string_view raw) {
    std::string out;
    for (size_t i = 0; i < raw.size();) {
      if (raw[i] != '&') {
        out += raw[i++];
        continue;
      }
      const size_t end = raw.find(';', i);
      const std::string entity(raw.substr(i + 1, end == std::string_view::npos ? 0 : end - i - 1));
      const auto known = kEntities().find(entity);
      if (known == kEntities().end()) {
        fail("an entity, not &" + entity);
        return out;
      }
      out += known->second;
      i = end + 1;
    }
    return out;
  }

  static const std::map<std::string, char>& kEntities() {
    static const std::map<std::string, char> entities = {
        {"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}};
    return entities;
  }

  std::string name() {
    std::string out;
    while (at_ < text_.size() && (std::isalnum(static_cast<unsigned char>(text_[at_])) != 0 ||
                                  text_[at_] == '-' || text_[at_] == ':')) {
      out += text_[at_++];
    }
    if (out.empty()) fail("a name");
    return out;
  }
  bool spaces() {
    const size_t begin = at_;
    while (at_ < text_.size() && std::isspace(static_cast<unsigned char>(text_[at_])) != 0) ++at_;
    return at_ > begin;
  }
  bool take(std::string_view part) {
    if (text_.substr(at_, part.size()) != part) return false;
    at_ += part.size();
    return true;
  }
  void fail(const std::string& expected) {
    if (!failed_) {
      ADD_FAILURE() << "byte " << at_ << ": expected " << expected << ", found "
                    << text_.substr(at_, 60);
    }
    failed_ = true;
  }

  std::string_view text_;
  size_t at_ = 0;
  bool failed_ = false;
};

inline XmlElement read_xml(std::string_view text) {
  return XmlReader(text).document();
}

}  // namespace sqz::testing
