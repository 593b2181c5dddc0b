#include "tools/sqz_eval/judge.h"

#include <algorithm>

#include "tools/sqz_eval/probe.h"

namespace sqz::eval {
namespace {

constexpr const char* kText = "text";
constexpr const char* kQuestions = "questions";
constexpr int64_t kSpareTokens = 2;  // of an answer: enough to see that no digit follows

}  // namespace

Result<std::vector<Judge::Served>> Judge::open(const Pass& pass, size_t view,
                                               const PassIndexes& indexes) {
  std::vector<Served> out;
  std::map<std::string, std::shared_ptr<OpenIndex>> opened;  // settings share what they can
  for (size_t i = 0; i < settings_.size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(sqz_session_options options,
                         session_options(settings_[i].options, threads_));
    options.max_tokens = std::max<int64_t>(4096, options_.continuation);
    const std::string& path = indexes.path(view, settings_[i].index);
    auto& file = opened[path];
    if (file == nullptr) {
      SQZ_ASSIGN_OR_RETURN(file, OpenIndex::open(path));
      if (gpu_) SQZ_RETURN_IF_ERROR(file->upload(*gpu_));
    }
    SQZ_ASSIGN_OR_RETURN(auto index, IndexContext::create(file, options));
    Served served{i, std::move(index), nullptr};
    served.context =
        std::make_unique<PlacedContext>(*served.index, static_cast<int64_t>(pass.ids.size()));
    out.push_back(std::move(served));
  }
  return out;
}

Status Judge::judge(const Pass& pass, size_t view, const PassIndexes& indexes) {
  SQZ_ASSIGN_OR_RETURN(std::vector<Served> served, open(pass, view, indexes));
  if (pass.views[view].question) {
    const Fact& fact = pass.facts[view];
    std::vector<int32_t> prompt;
    SQZ_RETURN_IF_ERROR(model_.tokenizer->encode(fact.prompt, false, prompt));
    if (options_.wants(Task::kNeedle1)) SQZ_RETURN_IF_ERROR(ask(fact, prompt, served));
    if (options_.wants(Task::kError) || options_.wants(Task::kRecall)) {
      SQZ_RETURN_IF_ERROR(probe(prompt, false, std::ssize(prompt), kQuestions, served).status());
    }
  }
  return pass.views[view].text ? measure_text(pass, served) : Status();
}

Status Judge::ask(const Fact& fact, std::span<const int32_t> prompt, std::vector<Served>& served) {
  for (Served& one : served) {
    SQZ_RETURN_IF_ERROR(one.index->reset_stats());
    SQZ_ASSIGN_OR_RETURN(const bool right, answered(fact, prompt, one));
    SQZ_RETURN_IF_ERROR(add({Task::kNeedle1, ""}, one, {right ? 1.0 : 0.0}));
  }
  return {};
}

Result<bool> Judge::answered(const Fact& fact, std::span<const int32_t> prompt, Served& served) {
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
  SQZ_RETURN_IF_ERROR(model_.runner->generate(prompt, options, served.context.get()).status());
  SQZ_RETURN_IF_ERROR(failed);
  return answers(fact, text);
}

Result<std::vector<double>> Judge::probe(std::span<const int32_t> tokens, bool losses,
                                         int64_t block, const std::string& on,
                                         std::vector<Served>& served) {
  // Dense is always the first setting.
  std::vector<FixedContext*> sparse;
  for (size_t i = 1; i < served.size(); ++i) {
    SQZ_RETURN_IF_ERROR(served[i].index->reset_stats());
    sparse.push_back(served[i].context.get());
  }
  Probe probe(model_.description(), sparse, static_cast<int64_t>(tokens.size()) - (losses ? 1 : 0));
  ScoreOptions options;
  options.losses = losses;
  options.observer = [&](const ObservedAttention& dense) { return probe.observe(dense); };
  SQZ_ASSIGN_OR_RETURN(auto dense_losses,
                       model_.runner->score(tokens, *served[0].context, options));
  const auto results = probe.results();
  for (size_t i = 0; i < results.size(); ++i) {
    const Served& one = served[i + 1];
    const Measure error{Task::kError, on}, recall{Task::kRecall, on};
    if (options_.wants(Task::kError)) {
      SQZ_RETURN_IF_ERROR(add(error, one, block_means(results[i].error, block)));
    }
    // With key codes on a CPU, the lse counts the approximated keys, too.
    const bool drops = gpu_ || settings_[one.setting].index.key_codes == 0;
    if (options_.wants(Task::kRecall) && drops) {
      SQZ_RETURN_IF_ERROR(add(recall, one, block_means(results[i].recall, block)));
    }
  }
  return dense_losses;
}

Status Judge::measure_text(const Pass& pass, std::vector<Served>& served) {
  SQZ_RETURN_IF_ERROR(served[0].index->reset_stats());
  std::vector<double> dense;
  if (options_.wants(Task::kError) || options_.wants(Task::kRecall)) {
    SQZ_ASSIGN_OR_RETURN(dense, probe(pass.continuation, true, kBlockTokens, kText, served));
  } else {
    SQZ_ASSIGN_OR_RETURN(dense, model_.runner->score(pass.continuation, *served[0].context, {}));
  }
  if (!options_.wants(Task::kLoss)) return {};
  SQZ_RETURN_IF_ERROR(add({Task::kLoss, ""}, served[0], block_means(dense, kBlockTokens)));
  for (size_t i = 1; i < served.size(); ++i) {
    SQZ_RETURN_IF_ERROR(served[i].index->reset_stats());
    SQZ_ASSIGN_OR_RETURN(const auto losses,
                         model_.runner->score(pass.continuation, *served[i].context, {}));
    SQZ_RETURN_IF_ERROR(add({Task::kLoss, ""}, served[i], block_means(losses, kBlockTokens)));
  }
  return {};
}

// Values of one session since its last reset.
Status Judge::add(const Measure& measure, const Served& served, const std::vector<double>& values) {
  Cell& cell = cells_[measure][served.setting];
  for (const double value : values) cell.value.add(value);
  SQZ_ASSIGN_OR_RETURN(const sqz_stats stats, served.index->stats());
  cell.reads.add(stats);
  return {};
}

Row Judge::row(const Measure& measure, size_t setting) const {
  const bool accuracy = measure.task == Task::kNeedle1;
  Row out;
  out.tokens = options_.tokens;
  out.task = kTaskNames[static_cast<size_t>(measure.task)];
  out.on = measure.on;
  out.setting = settings_[setting];
  const auto& cells = cells_.at(measure);
  const Cell& cell = cells.at(setting);
  const Samples& value = cell.value;
  out.trials = value.count();
  out.value = {value.mean(),
               accuracy ? binomial_error(value.mean(), value.count()) : value.standard_error()};
  if (setting > 0 && cells.contains(0)) {
    const Samples& dense = cells.at(0).value;
    const Samples change = difference(value, dense);
    out.difference = {change.mean(), change.standard_error()};
    if (accuracy) out.agreement = {count_both(dense, dense), count_both(value, dense)};
  }
  out.reads = cell.reads;
  return out;
}

std::vector<Row> Judge::rows() const {
  std::vector<Row> out;
  for (const auto& [measure, cells] : cells_) {
    for (const auto& [setting, cell] : cells) out.push_back(row(measure, setting));
  }
  return out;
}

}  // namespace sqz::eval
