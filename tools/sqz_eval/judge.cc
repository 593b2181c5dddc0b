#include "tools/sqz_eval/judge.h"

#include <spdlog/spdlog.h>

#include <algorithm>

#include "tools/common/signals.h"
#include "tools/sqz_eval/probe.h"

namespace sqz::eval {
namespace {

constexpr const char* kText = "text";
constexpr const char* kQuestions = "questions";
constexpr int64_t kSpareTokens = 2;  // of an answer: enough to see that no digit follows

}  // namespace

bool Judge::wants(Task task) const {
  return std::find(options_.tasks.begin(), options_.tasks.end(), task) != options_.tasks.end();
}

Result<std::vector<Judge::Served>> Judge::open(const Pass& pass, size_t view,
                                               const PassIndexes& indexes) {
  std::vector<Served> out;
  std::map<std::string, std::shared_ptr<OpenIndex>> opened;  // settings share what they can
  for (size_t i = 0; i < settings_.size(); ++i) {
    if (!skipped_[i].empty()) continue;
    SelectorOptions served_as = settings_[i].options;
    served_as.selector = settings_[i].traits->served;
    SQZ_ASSIGN_OR_RETURN(sqz_session_options options, session_options(served_as, threads_));
    options.max_tokens = std::max<int64_t>(4096, options_.continuation);
    const std::string& path = indexes.path(view, settings_[i].index());
    auto& file = opened[path];
    if (file == nullptr) {
      SQZ_ASSIGN_OR_RETURN(file, OpenIndex::open(path));
      if (gpu_) SQZ_RETURN_IF_ERROR(file->upload(*gpu_));
    }
    auto index = IndexContext::create(file, options);
    const bool refused = !index.ok() && index.status().code() == Code::kInvalidArgument;
    if (refused && !settings_[i].dense()) {
      // A budget that cannot be met, usually: no reason to lose the other settings.
      skipped_[i] = index.status().message();
      spdlog::warn("{}: skipped: {}", settings_[i].text(), skipped_[i]);
      continue;
    }
    if (!index.ok()) return index.status();
    Served served{i, std::move(index).value(), nullptr};
    served.context =
        std::make_unique<PlacedContext>(*served.index, static_cast<int64_t>(pass.ids.size()));
    out.push_back(std::move(served));
  }
  return out;
}

Status Judge::judge(const Pass& pass, size_t view, const PassIndexes& indexes,
                    const std::function<void(double)>& progress) {
  SQZ_ASSIGN_OR_RETURN(std::vector<Served> served, open(pass, view, indexes));
  const View& seen = pass.views[view];
  const double steps = static_cast<double>(seen.questions.size() + 1);
  for (size_t i = 0; i < seen.questions.size(); ++i) {
    SQZ_RETURN_IF_ERROR(check_stop());
    const Question& question = seen.questions[i];
    if (wants(question.task)) SQZ_RETURN_IF_ERROR(ask(pass, question, served));
    const bool single = question.task != Task::kNeedle4;
    if (single && (wants(Task::kError) || wants(Task::kRecall))) {
      SQZ_RETURN_IF_ERROR(probe_question(pass, question, served));
    }
    progress(static_cast<double>(i + 1) / steps);
  }
  if (seen.text) SQZ_RETURN_IF_ERROR(measure_text(pass, served));
  progress(1);
  return {};
}

Status Judge::ask(const Pass& pass, const Question& question, std::vector<Served>& served) {
  const Fact& fact = pass.facts[question.fact];
  std::vector<int32_t> prompt;
  SQZ_RETURN_IF_ERROR(model_.tokenizer().encode(fact.prompt, false, prompt));
  for (Served& one : served) {
    SQZ_RETURN_IF_ERROR(one.index->reset_stats());
    SQZ_ASSIGN_OR_RETURN(const bool right, answered(fact, prompt, one));
    SQZ_RETURN_IF_ERROR(add({question.task, ""}, one, {right ? 1.0 : 0.0}));
  }
  return {};
}

Result<bool> Judge::answered(const Fact& fact, const std::vector<int32_t>& prompt, Served& served) {
  std::vector<int32_t> ids, expected;
  SQZ_RETURN_IF_ERROR(model_.tokenizer().encode(" " + fact.answer, false, expected));
  std::string text;
  Status failed;
  GenerateOptions options;
  options.max_tokens = static_cast<int64_t>(expected.size()) + kSpareTokens;
  options.on_token = [&](int32_t id) {
    ids.push_back(id);
    auto decoded = model_.tokenizer().decode(ids);
    failed = decoded.status();
    if (!decoded.ok()) return false;
    text = std::move(decoded).value();
    return !decided(fact, text);
  };
  SQZ_RETURN_IF_ERROR(model_.runner().generate(prompt, options, served.context.get()).status());
  SQZ_RETURN_IF_ERROR(failed);
  return answers(fact, text);
}

Status Judge::probe_question(const Pass& pass, const Question& question,
                             std::vector<Served>& served) {
  std::vector<int32_t> prompt;
  SQZ_RETURN_IF_ERROR(model_.tokenizer().encode(pass.facts[question.fact].prompt, false, prompt));
  return probe(prompt, false, static_cast<int64_t>(prompt.size()), kQuestions, served).status();
}

Result<std::vector<double>> Judge::probe(std::span<const int32_t> tokens, bool losses,
                                         int64_t block, const std::string& on,
                                         std::vector<Served>& served) {
  // Dense is always the first setting, and can always be served.
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
                       model_.runner().score(tokens, *served[0].context, options));
  const auto results = probe.results();
  for (size_t i = 0; i < results.size(); ++i) {
    const Served& one = served[i + 1];
    const Measure error{Task::kError, on}, recall{Task::kRecall, on};
    if (wants(Task::kError)) {
      SQZ_RETURN_IF_ERROR(add(error, one, block_means(results[i].error, block)));
      for (const double value : block_means(results[i].context_error, block)) {
        cells_[error][one.setting].context_error.add(value);
      }
    }
    // The lse counts keys that were approximated, too.
    if (wants(Task::kRecall) && !settings_[one.setting].approximates) {
      SQZ_RETURN_IF_ERROR(add(recall, one, block_means(results[i].recall, block)));
    }
  }
  return dense_losses;
}

Status Judge::measure_text(const Pass& pass, std::vector<Served>& served) {
  if (wants(Task::kError) || wants(Task::kRecall) || wants(Task::kLoss)) {
    SQZ_RETURN_IF_ERROR(measure_losses(pass, served));
  }
  return {};
}

Status Judge::measure_losses(const Pass& pass, std::vector<Served>& served) {
  SQZ_RETURN_IF_ERROR(served[0].index->reset_stats());
  std::vector<double> dense;
  if (wants(Task::kError) || wants(Task::kRecall)) {
    SQZ_ASSIGN_OR_RETURN(dense, probe(pass.continuation, true, kBlockTokens, kText, served));
  } else {
    SQZ_ASSIGN_OR_RETURN(dense, model_.runner().score(pass.continuation, *served[0].context, {}));
  }
  if (!wants(Task::kLoss)) return {};
  SQZ_RETURN_IF_ERROR(add({Task::kLoss, ""}, served[0], block_means(dense, kBlockTokens)));
  for (size_t i = 1; i < served.size(); ++i) {
    SQZ_RETURN_IF_ERROR(check_stop());
    SQZ_RETURN_IF_ERROR(served[i].index->reset_stats());
    SQZ_ASSIGN_OR_RETURN(const auto losses,
                         model_.runner().score(pass.continuation, *served[i].context, {}));
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
  const auto& cells = cells_.at(measure);
  const Cell& cell = cells.at(setting);
  const Samples& value = cell.value;
  const bool accuracy = measure.task == Task::kNeedle1 || measure.task == Task::kNeedle4 ||
                        measure.task == Task::kPasskey;
  Row out;
  out.tokens = options_.tokens;
  out.task = task_name(measure.task);
  out.on = measure.on;
  out.setting = settings_[setting];
  out.trials = value.count();
  out.value = {value.mean(),
               accuracy ? binomial_error(value.mean(), value.count()) : value.standard_error()};
  if (setting > 0 && cells.contains(0)) {
    const Samples& dense = cells.at(0).value;
    const Samples change = difference(value, dense);
    out.difference = {change.mean(), change.standard_error()};
    if (accuracy) out.agreement = {count_both(dense, dense), count_both(value, dense)};
  }
  if (cell.context_error.count() > 0) {
    out.context_error = {cell.context_error.mean(), cell.context_error.standard_error()};
  }
  out.reads = cell.reads;
  return out;
}

std::vector<Row> Judge::rows() const {
  std::vector<Row> out;
  for (const auto& [measure, cells] : cells_) {
    for (size_t setting = 0; setting < settings_.size(); ++setting) {
      if (skipped_[setting].empty()) {
        if (cells.contains(setting)) out.push_back(row(measure, setting));
      } else {
        Row skipped;
        skipped.tokens = options_.tokens;
        skipped.task = task_name(measure.task);
        skipped.on = measure.on;
        skipped.setting = settings_[setting];
        skipped.skipped = skipped_[setting];
        out.push_back(std::move(skipped));
      }
    }
  }
  return out;
}

}  // namespace sqz::eval
