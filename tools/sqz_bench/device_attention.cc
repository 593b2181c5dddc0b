// `attend` and `prefill` on a GPU: what libsqz serves with, dense and sparse, and plain reads of
// the same memory.
#include <algorithm>
#include <cmath>

#include "libruntime/cuda/backend.h"
#include "libruntime/cuda/device_index.h"
#include "tools/sqz_bench/attention_fixture.h"
#include "tools/sqz_bench/device_bench.h"
#include "tools/sqz_bench/device_reads.h"
#include "tools/sqz_bench/kernel_times.h"

namespace sqz::bench {
namespace {

using cuda::CurrentDevice;

// What the contenders of a case share.
struct Work : DeviceBench {
  std::shared_ptr<const Fixture> fixture;
  int64_t calls = 1;                                       // of a graph
  std::vector<std::shared_ptr<cuda::DeviceIndex>> copies;  // of the layer
  cuda::DeviceMemory queries, out, lse, sink;
  int threads = 1;
  std::vector<std::vector<float>> dense;  // what dense_outputs() are, once they were asked for

  void* query(size_t set) const {
    return static_cast<std::byte*>(queries.data()) + set * fixture->queries[0].size();
  }
};

// One way to serve: a session for each copy.
struct Serving {
  std::shared_ptr<Work> work;
  std::vector<std::unique_ptr<ServingSession>> sessions;
  DeviceGraph graph;
  int place = 0;

  AttendCall call(int64_t i, cudaStream_t stream) const {
    const auto set = static_cast<size_t>(i) % work->fixture->queries.size();
    AttendCall call = work->fixture->call(work->query(set));
    call.out = work->out.data();
    call.lse = static_cast<float*>(work->lse.data());
    call.stream = stream;
    return call;
  }
  Status enqueue(cudaStream_t stream) const {
    for (int64_t i = 0; i < work->calls; ++i) {
      SQZ_RETURN_IF_ERROR(
          sessions[static_cast<size_t>(i) % sessions.size()]->attend(call(i, stream)));
    }
    return {};
  }
};

Status prepare(Work& work, int gpu, int64_t copies) {
  const CurrentDevice current(gpu);
  for (int64_t i = 0; i < copies; ++i) {
    cuda::UploadOptions upload;
    upload.device = gpu;
    SQZ_ASSIGN_OR_RETURN(auto copy, cuda::upload_index(work.fixture->served, upload));
    work.copies.push_back(std::move(copy));
  }
  const Fixture& fixture = *work.fixture;
  const size_t bytes = fixture.queries[0].size();
  const auto rows = static_cast<size_t>(fixture.tokens * fixture.query_heads());
  SQZ_RETURN_IF_ERROR(work.queries.reserve(fixture.queries.size() * bytes));
  SQZ_RETURN_IF_ERROR(work.out.reserve(bytes));
  SQZ_RETURN_IF_ERROR(work.lse.reserve(rows * sizeof(float)));
  SQZ_RETURN_IF_ERROR(work.sink.reserve(sizeof(unsigned)));
  for (size_t set = 0; set < fixture.queries.size(); ++set) {
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(work.query(set), fixture.queries[set].data(), bytes, cudaMemcpyHostToDevice));
  }
  return work.open(gpu);
}

// A contender's graph is of `calls` calls.
Contender timed(const std::shared_ptr<Work>& work, const std::string& name, int place,
                const std::shared_ptr<DeviceGraph>& graph, int64_t calls) {
  Contender out = replayed(work, name, place, graph);
  out.seconds = [graph, calls] { return graph->seconds() / static_cast<double>(calls); };
  return out;
}

Result<Contender> reads(const std::shared_ptr<Work>& work, int place) {
  const CurrentDevice current(work->gpu);
  const auto graph = std::make_shared<DeviceGraph>();
  const auto read_copies = [&](cudaStream_t stream) -> Status {
    for (const auto& copy : work->copies) {
      const cuda::DeviceLayer& layer = copy->layer(0);
      const auto [keys, values] = stored_rows(layer);
      SQZ_RETURN_IF_CUDA_ERROR(read_device(keys, values, work->fixture->key_bytes(),
                                           static_cast<unsigned*>(work->sink.data()), stream));
    }
    return {};
  };
  SQZ_RETURN_IF_ERROR(graph->capture(work->stream.get(), read_copies));
  Contender out = timed(work, "read", place, graph, std::ssize(work->copies));
  out.details = [work, place] { return JsonMembers{{"clock", work->clock->summary(place)}}; };
  return out;
}

Result<Counters> counters_of_a_replay(Serving& serving) {
  for (const auto& session : serving.sessions) SQZ_RETURN_IF_ERROR(session->clear_totals());
  SQZ_RETURN_IF_ERROR(serving.graph.run(serving.work->stream.get()));
  Counters sum;
  for (const auto& session : serving.sessions) {
    SQZ_ASSIGN_OR_RETURN(const Counters one, session->totals(0));
    sum.add(one);
  }
  return sum;
}

// Multiplications and additions of a sparse call with blocks of equal size: each query meets its
// block's keys and the exact ones.
double sparse_flop(const Fixture& fixture, const Counters& counters) {
  const LayerView& view = fixture.layer();
  const auto heads = static_cast<double>(view.kv_heads);
  const double met =
      static_cast<double>(counters.keys_read) / static_cast<double>(counters.selections) +
      heads * static_cast<double>(view.exact);
  return 4.0 * static_cast<double>(view.head_dim * fixture.tokens) * met *
         static_cast<double>(fixture.query_heads()) / heads;
}

// The mean over tokens and heads of the difference to dense attention over 16 bits, relative to it.
Result<double> error_of(Serving& serving) {
  constexpr size_t kSets = 8;
  Work& work = *serving.work;
  const Fixture& fixture = *work.fixture;
  if (work.dense.empty()) {
    SQZ_ASSIGN_OR_RETURN(work.dense, dense_outputs(fixture, work.threads, kSets));
  }
  const auto dim = static_cast<size_t>(fixture.layer().head_dim);
  double sum = 0, rows = 0;
  std::vector<std::byte> bytes(fixture.queries[0].size());
  for (size_t set = 0; set < work.dense.size(); ++set) {
    const AttendCall call = serving.call(static_cast<int64_t>(set), work.stream.get());
    SQZ_RETURN_IF_ERROR(serving.sessions[0]->attend(call));
    SQZ_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(work.stream.get()));
    SQZ_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(bytes.data(), call.out, bytes.size(), cudaMemcpyDeviceToHost));
    const std::vector<float> found = widened(bytes, fixture.dtype);
    for (size_t row = 0; row < found.size(); row += dim, ++rows) {
      double error = 0, length = 0;
      for (size_t i = row; i < row + dim; ++i) {
        const double expected = work.dense[set][i];
        error += (found[i] - expected) * (found[i] - expected);
        length += expected * expected;
      }
      sum += std::sqrt(error / length);
    }
  }
  return sum / rows;
}

// What selection came to, and the kernels of a call.
JsonMembers details(Serving& serving, bool sparse) {
  Work& work = *serving.work;
  const CurrentDevice current(work.gpu);
  JsonMembers out = {{"clock", work.clock->summary(serving.place)},
                     {"route", serving.sessions[0]->route()}};
  const auto counted = counters_of_a_replay(serving);
  if (counted.ok() && counted->selections > 0) {
    out.merge(delivered(*counted, work.calls));
    if (work.fixture->tokens_apart()) {
      out["bytes_read"] = static_cast<double>(counted->bytes_read) / double(work.calls);
      const auto error = sparse ? error_of(serving) : Result<double>(0.0);
      if (sparse && error.ok()) out["error"] = *error;
    } else if (sparse) {
      out["flop"] = sparse_flop(*work.fixture, *counted);
    }
  }
  cudaStream_t stream = work.stream.get();
  if (sparse) out["keys_per_run"] = keys_per_run(*serving.sessions[0], serving.call(0, stream));
  const auto kernels = record_kernels([&]() -> Status {
    SQZ_RETURN_IF_ERROR(serving.enqueue(stream));
    return cuda::cuda_status(cudaStreamSynchronize(stream), "calls");
  });
  out["kernels_us"] =
      kernels.ok() ? JsonText(kernel_parts(*kernels, work.calls)) : kernels.status().message();
  return out;
}

Result<Contender> served(const std::shared_ptr<Work>& work, const Options& options,
                         const Setting& setting, int place) {
  const CurrentDevice current(work->gpu);
  const auto serving = std::make_shared<Serving>();
  serving->work = work;
  serving->place = place;
  SessionOptions session_options = session_of(options, *work->fixture, setting);
  session_options.max_request_tokens = work->fixture->tokens_apart() ? 1 : 0;
  for (const auto& copy : work->copies) {
    SQZ_ASSIGN_OR_RETURN(auto session,
                         cuda::create_session(work->fixture->served, copy, session_options));
    serving->sessions.push_back(std::move(session));
  }
  SQZ_RETURN_IF_ERROR(serving->graph.capture(
      work->stream.get(),
      [serving = serving.get()](cudaStream_t stream) { return serving->enqueue(stream); }));
  const std::shared_ptr<DeviceGraph> graph(serving, &serving->graph);
  Contender out = timed(work, setting.name, place, graph, work->calls);
  const bool sparse = setting.kind == Setting::kSparse;
  out.details = [serving, sparse] { return details(*serving, sparse); };
  return out;
}

Result<CaseSetup> device_case(const Options& options, const AttentionCase& what, int64_t copies,
                              int64_t calls) {
  const auto work = std::make_shared<Work>();
  work->calls = calls;
  work->threads = options.threads;
  SQZ_ASSIGN_OR_RETURN(work->fixture, make_fixture(options, what));
  SQZ_RETURN_IF_ERROR(prepare(*work, options.gpu, copies));
  const auto make = [&](const Setting& setting, int place) {
    return setting.kind == Setting::kRead ? reads(work, place)
                                          : served(work, options, setting, place);
  };
  SQZ_ASSIGN_OR_RETURN(CaseSetup setup, attention_setup(*work->fixture, options, what, make));
  setup.shape.merge(describe_gpu(options.gpu));
  setup.shape.insert({{"copies", copies}, {"calls_a_graph", calls}});
  setup.baselines = {"dense"};
  return setup;
}

}  // namespace

Result<CaseSetup> attend_device_case(const Options& options) {
  const AttentionCase what = {true, options.tokens_or(131072), options.requests,
                              options.repeat_or(20), 8};
  return device_case(options, what, options.copies, 32);
}

Result<CaseSetup> prefill_device_case(const Options& options) {
  const AttentionCase what = {false, options.tokens_or(131072), options.queries_or(4096),
                              options.repeat_or(20), 2};
  return device_case(options, what, 1, 2);
}

}  // namespace sqz::bench
