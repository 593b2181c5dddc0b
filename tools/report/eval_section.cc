#include <algorithm>
#include <cmath>
#include <tuple>

#include "tools/report/sections.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

// What rows are about: one a plot.
struct Subject {
  std::string task, on;
  int64_t tokens = 0;
  bool operator==(const Subject&) const = default;
};
Subject subject_of(const EvalRow& row) {
  return {row.task, row.on, row.tokens};
}

struct TaskText {
  const char* name;
  const char* title;
  const char* value;
  bool from_zero;
};
constexpr TaskText kTasks[] = {
    {"needle1", "One needle", "answered", true},
    {"needle4", "Four needles", "answered", true},
    {"passkey", "Passkey", "answered", true},
    {"loss", "Loss", "loss, nats a token", false},
    {"error", "Error of the attention output", "error relative to dense", true},
    {"recall", "Recalled attention mass", "recall", true},
    {"drafts", "Drafts that dense attention keeps", "kept", true},
};

TaskText task_text(const std::string& task) {
  for (const TaskText& text : kTasks) {
    if (task == text.name) return text;
  }
  return {task.c_str(), task.c_str(), "value", false};
}

std::string setting_list(const EvalRow& row) {
  return row.skipped.empty() ? row.setting : row.setting + " (skipped: " + row.skipped + ")";
}

// Losses of texts differ more than those of settings do: they are shown above dense, trial by
// trial.
bool shown_above_dense(const Subject& subject, std::span<const EvalRow> rows) {
  return subject.task == "loss" && std::all_of(rows.begin(), rows.end(), [&](const EvalRow& row) {
           return subject_of(row) != subject || row.dense || !row.skipped.empty() ||
                  (row.difference && row.difference_error);
         });
}

std::string title_of(const Subject& subject) {
  return concat(task_text(subject.task).title, subject.on.empty() ? "" : " on " + subject.on, ", ",
                subject.tokens, " tokens");
}

// The measured value against what was read.
Plot value_plot(const Subject& subject, std::span<const EvalRow> rows) {
  const TaskText task = task_text(subject.task);
  const bool recall = subject.task == "recall", above = shown_above_dense(subject, rows);
  Plot out;
  out.title = title_of(subject);
  out.x_label = recall ? "selectivity: share of the clustered keys that was read"
                       : "delivered budget: share of the context's bytes that was read";
  out.y_label = above ? "loss above dense, nats a token" : task.value;
  out.from_zero = task.from_zero;
  for (const EvalRow& row : rows) {
    if (subject_of(row) != subject || !row.skipped.empty()) continue;
    if (row.dense) {
      out.levels.push_back({"dense", above ? 0 : row.value});
      continue;
    }
    out.add(row.setting, {recall ? row.keep : row.budget, above ? *row.difference : row.value,
                          above ? *row.difference_error : row.error});
  }
  out.sort();
  return out;
}

void add_subject(const Subject& subject, std::span<const EvalRow> rows, HtmlPage& page) {
  Plot delivered;
  delivered.title = "Delivered against asked, " + title_of(subject);
  delivered.x_label = "asked budget";
  delivered.y_label = "delivered budget";
  delivered.diagonal = true;
  bool off = false;  // whether anything was delivered that was not asked for
  std::vector<std::vector<std::string>> lines;
  for (const EvalRow& row : rows) {
    if (subject_of(row) != subject) continue;
    if (!row.skipped.empty()) {
      lines.push_back(
          {setting_list(row), fixed_text(row.asked_budget, 4), "", "", "", "", "", "", ""});
      continue;
    }
    lines.push_back({setting_list(row), fixed_text(row.asked_budget, 4), fixed_text(row.budget, 4),
                     fixed_text(row.keep, 4), fixed_text(row.value, 4), fixed_text(row.error, 4),
                     row.difference ? fixed_text(*row.difference, 4) : "",
                     row.difference_error ? fixed_text(*row.difference_error, 4) : "",
                     concat(row.trials)});
    if (row.dense) continue;
    delivered.add(row.setting, {row.asked_budget, row.budget, 0});
    off |= std::abs(row.budget - row.asked_budget) > 0.01 * row.asked_budget;
  }
  delivered.sort();
  page.subheading(title_of(subject));
  page.figure(plot_svg(value_plot(subject, rows)),
              "With standard errors; a line a setting, a dot a budget.");
  if (off) page.figure(plot_svg(delivered), "On the faint line what is asked for is delivered.");
  page.table({"setting", "asked", "delivered", "keys", task_text(subject.task).value, "±",
              "to dense", "±", "n"},
             lines);
}

}  // namespace

void add_eval_section(std::span<const EvalRow> rows, HtmlPage& page) {
  std::vector<Subject> subjects;
  for (const EvalRow& row : rows) {
    const Subject subject = subject_of(row);
    if (std::find(subjects.begin(), subjects.end(), subject) == subjects.end()) {
      subjects.push_back(subject);
    }
  }
  for (const Subject& subject : subjects) add_subject(subject, rows, page);
}

Result<std::string> needles_figure(std::span<const EvalRow> rows) {
  Subject needles{"needle1", "", 0};
  for (const EvalRow& row : rows) {
    if (row.task == needles.task) needles.tokens = std::max(needles.tokens, row.tokens);
  }
  Subject error{"error", "text", needles.tokens};
  for (const EvalRow& row : rows) {
    if (row.task == error.task && row.tokens == error.tokens && row.on == "questions") {
      error.on = row.on;
    }
  }
  const Plot plots[] = {value_plot(needles, rows), value_plot(error, rows)};
  for (const Plot& plot : plots) {
    if (!plot.series.empty()) continue;
    return Status(Code::kInvalidArgument,
                  "--figure needles: found no rows of one of the tasks needle1 and error, expected "
                  "what sqz-eval --task needle1,error --json printed");
  }
  return figure_svg(plots, kPlotStyle);
}

}  // namespace sqz
