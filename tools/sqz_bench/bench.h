// The command: options, the list of cases, the run and its report.
#pragma once

#include "tools/common/tool.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

extern const char* const kDescription;
extern const char* const kHelp;

void add_bench_options(CLI::App& app, Options& options);
Status run_bench(Options options, const ToolContext& context);

}  // namespace sqz::bench
