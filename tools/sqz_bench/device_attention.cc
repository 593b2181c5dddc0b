// `attend` and `prefill` on a GPU: what libsqz serves with, dense and sparse, and plain reads of
// the same memory.
#include <algorithm>
#include <cmath>
#include <memory>
#include <utility>

#include "libruntime/cuda/backend.h"
#include "libruntime/cuda/cuda_status.h"
#include "libruntime/cuda/device.h"
#include "libruntime/cuda/device_index.h"
#include "tools/sqz_bench/attention_fixture.h"
#include "tools/sqz_bench/device_cases.h"
#include "tools/sqz_bench/device_graph.h"
#include "tools/sqz_bench/device_reads.h"
#include "tools/sqz_bench/gpu_clock.h"
#include "tools/sqz_bench/kernel_times.h"

namespace sqz::bench {
namespace {

using cuda::CurrentDevice;

constexpr int64_t kSets = 8;

// What the contenders of a case share.
struct Work {
  std::shared_ptr<const Fixture> fixture;
  int gpu = 0;
  int64_t calls = 1;                                       // of a graph
  std::vector<std::shared_ptr<cuda::DeviceIndex>> copies;  // of the layer
  cuda::DeviceMemory memory;
  std::vector<std::byte*> queries;  // of the sets
  std::byte* out = nullptr;
  float* lse = nullptr;
  unsigned* sink = nullptr;
  cuda::Stream stream;
  std::unique_ptr<GpuClock> clock;

  size_t query_bytes() const { return fixture->queries[0].size(); }
};

// One way to serve: a session for each copy.
struct Serving {
  std::shared_ptr<Work> work;
  std::vector<std::unique_ptr<ServingSession>> sessions;
  DeviceGraph graph;
  int place = 0;

  AttendCall call(int64_t i, cudaStream_t stream) const {
    AttendCall call = work->fixture->call(i);
    call.q = work->queries[static_cast<size_t>(i) % work->queries.size()];
    if (work->fixture->before_rope) call.q_before_rope = call.q;
    call.out = work->out;
    call.lse = work->lse;
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

void lay_out(Work& work, void* base, size_t& used) {
  cuda::Layout layout(base);
  const auto bytes = static_cast<int64_t>(work.query_bytes());
  work.queries.clear();
  for (size_t set = 0; set < work.fixture->queries.size(); ++set) {
    work.queries.push_back(layout.take<std::byte>(bytes));
  }
  work.out = layout.take<std::byte>(bytes);
  work.lse = layout.take<float>(work.fixture->tokens * work.fixture->query_heads());
  work.sink = layout.take<unsigned>(1);
  used = layout.used();
}

Status prepare(Work& work, int64_t copies) {
  const CurrentDevice current(work.gpu);
  for (int64_t i = 0; i < copies; ++i) {
    cuda::UploadOptions upload;
    upload.device = work.gpu;
    SQZ_ASSIGN_OR_RETURN(auto copy, cuda::upload_index(work.fixture->served, upload));
    work.copies.push_back(std::move(copy));
  }
  size_t used = 0;
  lay_out(work, nullptr, used);
  SQZ_RETURN_IF_ERROR(work.memory.reserve(used));
  lay_out(work, work.memory.data(), used);
  for (size_t set = 0; set < work.queries.size(); ++set) {
    SQZ_RETURN_IF_CUDA_ERROR(cudaMemcpy(work.queries[set], work.fixture->queries[set].data(),
                                        work.query_bytes(), cudaMemcpyHostToDevice));
  }
  SQZ_RETURN_IF_ERROR(work.stream.create());
  char bus_id[64] = "";
  SQZ_RETURN_IF_CUDA_ERROR(cudaDeviceGetPCIBusId(bus_id, sizeof(bus_id), work.gpu));
  work.clock = std::make_unique<GpuClock>(bus_id);
  return {};
}

// A contender that replays a graph of `calls` calls.
Contender replayed(const std::shared_ptr<Work>& work, std::string name, int place,
                   std::shared_ptr<DeviceGraph> graph, int64_t calls) {
  Contender out;
  out.name = std::move(name);
  out.run = [work, graph, place](int64_t) {
    const CurrentDevice current(work->gpu);
    work->clock->watch(place);
    const Status status = graph->run(work->stream.get());
    work->clock->watch(-1);
    return status;
  };
  out.seconds = [graph, calls] { return graph->seconds() / static_cast<double>(calls); };
  return out;
}

Result<Contender> reads(const std::shared_ptr<Work>& work) {
  const CurrentDevice current(work->gpu);
  const auto graph = std::make_shared<DeviceGraph>();
  const LayerView& view = work->fixture->layer();
  const auto bytes = static_cast<size_t>(2 * view.kv_heads * view.slots * view.head_dim);
  const auto read_copies = [&](cudaStream_t stream) -> Status {
    for (const auto& copy : work->copies) {
      const cuda::DeviceLayer& layer = copy->layer(0);
      SQZ_RETURN_IF_CUDA_ERROR(read_device(layer.keys, layer.values, bytes, work->sink, stream));
    }
    return {};
  };
  SQZ_RETURN_IF_ERROR(graph->capture(work->stream.get(), read_copies));
  Contender out = replayed(work, "read", 0, graph, std::ssize(work->copies));
  out.bytes = 2.0 * static_cast<double>(bytes);
  out.details = [work] { return JsonMembers{{"clock", work->clock->summary(0)}}; };
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

double keys_per_run(Serving& serving) {
  const auto heads = serving.sessions[0]->select(serving.call(0, serving.work->stream.get()));
  if (!heads.ok()) return 0;
  int64_t keys = 0, runs = 0;
  for (const HeadSelection& head : *heads) {
    keys += head.keys;
    runs += head.run_count;
  }
  return runs == 0 ? 0 : static_cast<double>(keys) / static_cast<double>(runs);
}

// What selection came to, and the kernels of a call.
JsonMembers details(Serving& serving, const Setting& setting) {
  const Work& work = *serving.work;
  const CurrentDevice current(work.gpu);
  JsonMembers out = {{"clock", work.clock->summary(serving.place)}};
  const auto counted = counters_of_a_replay(serving);
  if (counted.ok() && counted->selections > 0) {
    const auto calls = static_cast<double>(work.calls);
    const auto keys = static_cast<double>(counted->keys_read);
    out["keep"] = keys / static_cast<double>(std::max<uint64_t>(counted->keys_possible, 1));
    out["budget"] = static_cast<double>(counted->bytes_read) /
                    static_cast<double>(std::max<uint64_t>(counted->bytes_dense, 1));
    out["selections"] = static_cast<double>(counted->selections) / calls;
    if (work.fixture->tokens == 1 || !work.fixture->indptr.empty()) {
      out["bytes_read"] = static_cast<double>(counted->bytes_read) / calls;
    } else if (setting.levels > 0) {
      // Blocks of equal size: each query meets its block's keys and the exact ones.
      const LayerView& view = work.fixture->layer();
      const auto heads = static_cast<double>(view.kv_heads);
      const double met =
          keys / static_cast<double>(counted->selections) + heads * static_cast<double>(view.exact);
      out["flop"] = 4.0 * static_cast<double>(view.head_dim * work.fixture->tokens) * met *
                    static_cast<double>(work.fixture->query_heads()) / heads;
    }
  }
  if (setting.levels > 0) out["keys_per_run"] = keys_per_run(serving);
  const auto kernels = record_kernels([&]() -> Status {
    SQZ_RETURN_IF_ERROR(serving.enqueue(work.stream.get()));
    return cuda::cuda_status(cudaStreamSynchronize(work.stream.get()), "calls");
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
  const bool tokens_apart = work->fixture->tokens == 1 || !work->fixture->indptr.empty();
  session_options.max_request_tokens = tokens_apart ? 1 : 0;
  for (const auto& copy : work->copies) {
    SQZ_ASSIGN_OR_RETURN(auto session,
                         cuda::create_session(work->fixture->served, copy, session_options));
    serving->sessions.push_back(std::move(session));
  }
  SQZ_RETURN_IF_ERROR(serving->graph.capture(
      work->stream.get(),
      [serving = serving.get()](cudaStream_t stream) { return serving->enqueue(stream); }));
  Contender out = replayed(work, setting.name, place,
                           std::shared_ptr<DeviceGraph>(serving, &serving->graph), work->calls);
  if (setting.levels == 0) {
    out.flop = work->fixture->dense_flop();
    out.bytes = work->fixture->kv_bytes();
  }
  out.details = [serving, setting] { return details(*serving, setting); };
  return out;
}

Result<CaseSetup> device_case(const Options& options, int64_t query_tokens, bool requests,
                              int64_t copies, int64_t calls) {
  const auto work = std::make_shared<Work>();
  work->gpu = options.gpu;
  work->calls = calls;
  SQZ_ASSIGN_OR_RETURN(work->fixture, make_fixture(options, options.tokens_or(131072), query_tokens,
                                                   requests, std::min(kSets, calls)));
  SQZ_RETURN_IF_ERROR(prepare(*work, copies));
  CaseSetup setup;
  setup.shape = shape_of(*work->fixture, options);
  const cuda::DeviceProbe probe = cuda::probe_device(options.gpu);
  setup.shape.insert({{"gpu", probe.name},
                      {"cuda_driver", probe.driver_version},
                      {"cuda_runtime", probe.runtime_version},
                      {"copies", copies},
                      {"calls_a_graph", calls}});
  setup.rounds = options.repeat_or(20);
  setup.baselines = {"dense"};
  if (requests) {
    SQZ_ASSIGN_OR_RETURN(Contender read, reads(work));
    setup.contenders.push_back(std::move(read));
  }
  for (const Setting& setting : settings_of(options, !requests)) {
    const int place = static_cast<int>(setup.contenders.size());
    SQZ_ASSIGN_OR_RETURN(Contender one, served(work, options, setting, place));
    setup.contenders.push_back(std::move(one));
  }
  return setup;
}

}  // namespace

Status check_device(const Options& options) {
  const Status status = cuda::check_probe(cuda::probe_device(options.gpu), options.gpu);
  return status.ok() ? status : Status(Code::kInvalidArgument, "--device: " + status.message());
}

Result<CaseSetup> attend_device_case(const Options& options) {
  return device_case(options, options.requests, true, options.copies, 32);
}

Result<CaseSetup> prefill_device_case(const Options& options) {
  return device_case(options, options.queries_or(4096), false, 1, 2);
}

}  // namespace sqz::bench
