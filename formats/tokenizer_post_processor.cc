#include "formats/tokenizer_steps.h"

namespace sqz {
namespace {

Status append_ids(const JsonObject& processor, const std::string& name, std::vector<int32_t>& out) {
  SQZ_ASSIGN_OR_RETURN(const JsonObject tokens, processor.object("special_tokens"));
  SQZ_ASSIGN_OR_RETURN(const JsonObject token, tokens.object(name));
  SQZ_ASSIGN_OR_RETURN(const JsonValue* ids, token.array("ids"));
  for (const JsonValue& value : ids->items()) {
    SQZ_ASSIGN_OR_RETURN(const int32_t id, json_token_id(value, token.file, token.name_of("ids")));
    out.push_back(id);
  }
  return {};
}

Result<SpecialAffixes> parse_template(const JsonObject& processor) {
  SQZ_ASSIGN_OR_RETURN(const JsonValue* items, processor.array("single"));
  SpecialAffixes affixes;
  bool text_seen = false;
  for (size_t i = 0; i < items->size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(const JsonObject item, processor.element("single", i));
    if (item.has("Sequence")) {
      if (text_seen) return item.unsupported("Sequence", "the text a second time");
      text_seen = true;
      continue;
    }
    SQZ_ASSIGN_OR_RETURN(const JsonObject special, item.object("SpecialToken"));
    SQZ_ASSIGN_OR_RETURN(const std::string name, special.string("id"));
    SQZ_RETURN_IF_ERROR(append_ids(processor, name, text_seen ? affixes.after : affixes.before));
  }
  if (!text_seen) return processor.bad("single", "no Sequence", "a Sequence, the text's place");
  return affixes;
}

}  // namespace

Result<SpecialAffixes> parse_post_processor(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "ByteLevel") return SpecialAffixes{};
  if (type == "TemplateProcessing") return parse_template(object);
  if (type != "Sequence") {
    return object.unsupported("type", concat("post-processor ", in_quotes(type)));
  }
  SQZ_ASSIGN_OR_RETURN(const auto steps, object.each("processors", parse_post_processor));
  SpecialAffixes all;
  for (const SpecialAffixes& outer : steps) {
    all.before.insert(all.before.begin(), outer.before.begin(), outer.before.end());
    all.after.insert(all.after.end(), outer.after.begin(), outer.after.end());
  }
  return all;
}

}  // namespace sqz
