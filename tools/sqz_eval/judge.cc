#include "tools/sqz_eval/judge.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace sqz::eval {
namespace {

constexpr const char* kText = "text";
constexpr const char* kQuestions = "questions";
constexpr int64_t kSpareTokens = 2;  // of an answer: enough to see that no digit follows

}  // namespace

Status Probe::observe(const ObservedAttention& dense) {
  if (first_ < 0) first_ = dense.first;
  terms_ = static_cast<double>((dense.layer + 1) * dense.heads);
  const auto heads = static_cast<size_t>(dense.heads), dim = static_cast<size_t>(dense.dim);
  const auto exact = merged_attention(dense, dense.context_out, dense.context_lse);
  for (size_t i = 0; i < sparse_.size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(const OtherAttention found, attention_with(*sparse_[i], dense));
    for (size_t row = 0; row < found.lse.size(); ++row) {
      const size_t token = static_cast<size_t>(dense.first - first_) + row / heads;
      sums_[i].error[token] += relative_error(std::span(found.merged).subspan(row * dim, dim),
                                              std::span(exact).subspan(row * dim, dim));
      sums_[i].recall[token] += recalled_mass(found.lse[row], dense.context_lse[row]);
    }
  }
  return {};
}

std::vector<ProbeResult> Probe::results() const {
  std::vector<ProbeResult> out = sums_;
  for (ProbeResult& result : out) {
    for (double& value : result.error) value /= terms_;
    for (double& value : result.recall) value /= terms_;
  }
  return out;
}

Result<Judge::Served> Judge::open(size_t view, const PassIndexes& indexes) {
  Served out;
  std::map<std::string, std::shared_ptr<OpenIndex>> opened;  // by path
  for (const Setting& setting : settings_) {
    sqz_session_options options = session_options(setting.options, threads_);
    options.max_tokens = std::max<int64_t>(4096, options_.continuation);
    options.max_contexts = setting.index.documents;
    int64_t position = 0;
    for (int d = 0; d < setting.index.documents; ++d) {
      const PassIndexes::File& file = indexes.file(view, setting.index, static_cast<size_t>(d));
      auto& index = opened[file.name.path()];
      if (index == nullptr) {
        SQZ_ASSIGN_OR_RETURN(index, OpenIndex::open(file.name.path()));
        if (gpu_) SQZ_RETURN_IF_ERROR(index->upload(*gpu_));
      }
      if (d == 0) {
        SQZ_ASSIGN_OR_RETURN(out.emplace_back(), IndexContext::create({index}, options));
      } else {
        SQZ_RETURN_IF_ERROR(out.back()->append(index, position));
      }
      position += file.tokens;
    }
    out.back()->place(position);
  }
  return out;
}

Status Judge::judge(const Pass& pass, size_t view, const PassIndexes& indexes) {
  SQZ_ASSIGN_OR_RETURN(const Served served, open(view, indexes));
  if (pass.views[view].question) {
    const Fact& fact = pass.facts[view];
    std::vector<int32_t> prompt;
    SQZ_RETURN_IF_ERROR(model_.tokenizer->encode(fact.prompt, false, prompt));
    if (options_.wants(kNeedle1)) SQZ_RETURN_IF_ERROR(ask(fact, prompt, served));
    if (options_.wants(kError) || options_.wants(kRecall)) {
      SQZ_RETURN_IF_ERROR(probe(prompt, false, std::ssize(prompt), kQuestions, served).status());
    }
  }
  return pass.views[view].text ? measure_text(pass, served) : Status();
}

Status Judge::ask(const Fact& fact, std::span<const int32_t> prompt, const Served& served) {
  for (size_t i = 0; i < served.size(); ++i) {
    SQZ_RETURN_IF_ERROR(served[i]->reset_stats());
    SQZ_ASSIGN_OR_RETURN(const bool right, answered(fact, prompt, *served[i]));
    SQZ_RETURN_IF_ERROR(add({kNeedle1, ""}, i, *served[i], {right ? 1.0 : 0.0}));
  }
  return {};
}

Result<bool> Judge::answered(const Fact& fact, std::span<const int32_t> prompt,
                             IndexContext& context) {
  std::vector<int32_t> ids, expected;
  SQZ_RETURN_IF_ERROR(model_.tokenizer->encode(" " + fact.answer, false, expected));
  std::string text;
  Status failed;
  GenerateOptions options;
  options.max_tokens = static_cast<int64_t>(expected.size()) + kSpareTokens;
  options.on_token = [&](int32_t id) {
    ids.push_back(id);
    auto decoded = model_.tokenizer->decode(ids);
    failed = decoded.status();
    if (!decoded.ok()) return false;
    text = std::move(decoded).value();
    return !decided(fact, text);
  };
  SQZ_RETURN_IF_ERROR(model_.runner->generate(prompt, options, &context).status());
  SQZ_RETURN_IF_ERROR(failed);
  return answers(fact, text);
}

Result<std::vector<double>> Judge::probe(std::span<const int32_t> tokens, bool losses,
                                         int64_t block, const std::string& on,
                                         const Served& served) {
  std::vector<FixedContext*> sparse;  // settings of several documents are behind those of one
  for (size_t i = 1; i < served.size() && settings_[i].index.documents == 1; ++i) {
    SQZ_RETURN_IF_ERROR(served[i]->reset_stats());
    sparse.push_back(served[i].get());
  }
  Probe probe(sparse, std::ssize(tokens) - (losses ? 1 : 0));
  ScoreOptions options;
  options.losses = losses;
  options.observer = [&](const ObservedAttention& dense) { return probe.observe(dense); };
  SQZ_ASSIGN_OR_RETURN(auto dense_losses, model_.runner->score(tokens, *served[0], options));
  const auto results = probe.results();
  for (size_t i = 1; i <= results.size(); ++i) {
    const ProbeResult& result = results[i - 1];
    if (options_.wants(kError)) {
      SQZ_RETURN_IF_ERROR(add({kError, on}, i, *served[i], block_means(result.error, block)));
    }
    if (options_.wants(kRecall)) {
      SQZ_RETURN_IF_ERROR(add({kRecall, on}, i, *served[i], block_means(result.recall, block)));
    }
  }
  return dense_losses;
}

Status Judge::measure_text(const Pass& pass, const Served& served) {
  SQZ_RETURN_IF_ERROR(served[0]->reset_stats());
  std::vector<double> dense;
  if (options_.wants(kError) || options_.wants(kRecall)) {
    SQZ_ASSIGN_OR_RETURN(dense, probe(pass.continuation, true, kBlockTokens, kText, served));
  } else {
    SQZ_ASSIGN_OR_RETURN(dense, model_.runner->score(pass.continuation, *served[0], {}));
  }
  for (size_t i = 0; i < served.size() && options_.wants(kLoss); ++i) {
    std::vector<double> losses = dense;
    if (i > 0) {
      SQZ_RETURN_IF_ERROR(served[i]->reset_stats());
      SQZ_ASSIGN_OR_RETURN(losses, model_.runner->score(pass.continuation, *served[i], {}));
    }
    SQZ_RETURN_IF_ERROR(add({kLoss, ""}, i, *served[i], block_means(losses, kBlockTokens)));
  }
  return {};
}

// Adds values of a session since its last reset.
Status Judge::add(const Measure& measure, size_t setting, const IndexContext& context,
                  const std::vector<double>& values) {
  Cell& cell = cells_[measure][setting];
  cell.values.insert(cell.values.end(), values.begin(), values.end());
  SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, context.stats());
  cell.reads.add(stats);
  return {};
}

JsonMembers Judge::row(const Measure& measure, size_t setting) const {
  const bool accuracy = measure.task == kNeedle1;
  const auto& cells = cells_.at(measure);
  const Cell& cell = cells.at(setting);
  const Reads& reads = cell.reads;
  const double value = mean(cell.values);
  const int64_t trials = std::ssize(cell.values);
  JsonMembers out = to_json(settings_[setting]);
  out["task"] = measure.task;
  if (!measure.on.empty()) out["on"] = measure.on;
  out["tokens"] = options_.tokens;
  out["trials"] = trials;
  out["value"] = value;
  out["stderr"] = accuracy ? binomial_error(value, trials) : standard_error(cell.values);
  if (setting > 0 && cells.contains(0)) {
    const std::vector<double>& dense = cells.at(0).values;
    const auto change = difference(cell.values, dense);
    out["difference"] = {{"value", mean(change)}, {"stderr", standard_error(change)}};
    // The trials that dense attention and the setting both answer.
    const auto both = [&](const std::vector<double>& a) {
      return std::llround(std::inner_product(a.begin(), a.end(), dense.begin(), 0.0));
    };
    if (accuracy) out["agreement"] = {{"dense", both(dense)}, {"both", both(cell.values)}};
  }
  out["budget"] = {{"asked", reads.asked_budget},
                   {"delivered", reads.delivered_budget()},
                   {"lowest", reads.lowest},
                   {"highest", reads.highest}};
  out["keep"] = {{"asked", reads.asked_keep}, {"delivered", reads.delivered_keep()}};
  out["dense_fallback"] = reads.dense_fallback;
  return out;
}

std::vector<JsonMembers> Judge::rows() const {
  std::vector<JsonMembers> out;
  for (const auto& [measure, cells] : cells_) {
    for (const auto& [setting, cell] : cells) out.push_back(row(measure, setting));
  }
  return out;
}

}  // namespace sqz::eval
