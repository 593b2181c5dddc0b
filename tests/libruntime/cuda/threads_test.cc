// Sessions at once on one GPU: threads that attend, that capture graphs, and that upload, create
// and destroy, all beside each other, and that fill slots. Nobody meets an error or other bits.
// SQZ_THREADS_SECONDS=600 runs it for ten minutes.
#include <array>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "tests/libruntime/cuda/blocks.h"

namespace sqz::cuda {
namespace {

using test::DeviceCall;
using testing::Served;

// A session, a call of it on a stream of its own, and what the call gives alone.
class Caller {
 public:
  Caller(const Served& served, const SelectionRequest& selection, int64_t requests)
      : session_(test::gpu_session(served, selection)),
        call_(served, 0, test::single_tokens(requests), DType::kBF16),
        bytes_(static_cast<size_t>(requests * served.options.query_heads * served.options.head_dim *
                                   2)) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    call_.set_queries(testing::make_queries(served, 0, requests, 7));
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    call_.call.stream = stream_;
    attend();
    expected_ = result();
  }
  ~Caller() { cudaStreamDestroy(stream_); }

  void attend() {
    const Status status = session_->attend(call_.call);
    EXPECT_TRUE(status.ok()) << status.message();
  }
  // Attends as a request of the context that `contexts` names in device memory.
  std::vector<std::byte> attend(ContextTable& table, const void* contexts) {
    const Status status = table.attend(call_.call, contexts, 1);
    EXPECT_TRUE(status.ok()) << status.message();
    return result();
  }
  const ServingSession& session() const { return *session_; }
  // The same as alone.
  void check() { EXPECT_TRUE(result() == expected_) << "other bits"; }
  void capture_and_replay() {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ASSERT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeGlobal), cudaSuccess);
    for (int i = 0; i < 20; ++i) attend();
    ASSERT_EQ(cudaStreamEndCapture(stream_, &graph), cudaSuccess) << "another thread broke it";
    ASSERT_EQ(cudaGraphInstantiate(&executable, graph, 0), cudaSuccess);
    EXPECT_EQ(cudaGraphLaunch(executable, stream_), cudaSuccess);
    check();
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
  }

 private:
  std::vector<std::byte> result() {
    std::vector<std::byte> out(bytes_);
    EXPECT_EQ(cudaMemcpyAsync(out.data(), call_.call.out, bytes_, cudaMemcpyDeviceToHost, stream_),
              cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
    return out;
  }

  std::unique_ptr<ServingSession> session_;
  DeviceCall call_;
  size_t bytes_;
  cudaStream_t stream_ = nullptr;
  std::vector<std::byte> expected_;
};

TEST(Threads, SessionsUploadsAndCaptures) {
  SQZ_SKIP_WITHOUT_GPU();
  const char* seconds = std::getenv("SQZ_THREADS_SECONDS");
  const std::chrono::seconds length(seconds == nullptr ? 4 : std::atoi(seconds));
  // Indexes of several sizes: the same kernels want different amounts of shared memory.
  const Served small = testing::serve(test::shape(128, 4, {40, 211})),
               large = testing::serve(test::shape(128, 4, {300, 1900}));
  const auto thresholds = test::with_thresholds({1e-4, 3e-4});
  // Made before the threads begin, since the tests' own memory is not for other threads' captures.
  Caller first(small, thresholds, 1), second(large, test::by_budget(0.1), 1);
  Caller batch(large, thresholds, 16), captured(small, test::by_budget(0.2), 1);
  std::atomic<bool> stop = false;
  std::atomic<int64_t> calls = 0, graphs = 0, sessions = 0;
  const auto until_stopped = [&](std::atomic<int64_t>& count, const auto& body) {
    return std::thread([&stop, &count, body] {
      auto mode = cudaStreamCaptureModeRelaxed;  // of what the test itself asks of CUDA
      cudaThreadExchangeStreamCaptureMode(&mode);
      while (!stop && !::testing::Test::HasFailure()) {
        body();
        ++count;
      }
    });
  };
  std::vector<std::thread> threads;
  for (Caller* caller : {&first, &second, &batch}) {
    threads.push_back(until_stopped(calls, [caller] {
      for (int i = 0; i < 5; ++i) caller->attend();
      caller->check();
    }));
  }
  threads.push_back(until_stopped(graphs, [&] { captured.capture_and_replay(); }));
  threads.push_back(until_stopped(sessions, [&] {
    const auto session = test::gpu_session(large, thresholds);
    EXPECT_TRUE(session != nullptr && session->totals(0).ok() && session->clear_totals().ok());
  }));
  std::this_thread::sleep_for(length);
  stop = true;
  for (std::thread& thread : threads) thread.join();
  std::printf("[          ] %ld rounds of calls, %ld graphs, %ld uploads and sessions\n",
              calls.load(), graphs.load(), sessions.load());
  EXPECT_GT(graphs, 0);
  EXPECT_GT(sessions, 0);
}

// A slot is filled beside the calls that read it: each is of the old context or of the new one.
TEST(Threads, ASlotIsFilledBesideItsCalls) {
  SQZ_SKIP_WITHOUT_GPU();
  if (!test::have_hopper()) GTEST_SKIP() << "no device of compute capability 9.0";
  auto options = test::shape(128, 4, {40, 211});
  const Served first = testing::serve(options);
  ++options.seed;
  const Served second = testing::serve(options);
  Caller caller(first, test::by_budget(0.2), 1);
  const auto other = test::gpu_session(second, test::by_budget(0.2));
  auto table = create_context_table(caller.session(), {.slots = 2, .requests = 1});
  ASSERT_TRUE(table.ok()) << table.status().message();
  const test::DeviceArray<int32_t> slot_1({1, 0, 0, 0});
  const std::array<const ServingSession*, 2> sessions = {&caller.session(), other.get()};
  std::vector<std::vector<std::byte>> answers;
  for (const ServingSession* session : sessions) {
    ASSERT_TRUE((*table)->put(1, session).ok());
    answers.push_back(caller.attend(**table, slot_1.get()));
  }
  ASSERT_NE(answers[0], answers[1]);
  std::atomic<bool> done = false;
  std::thread filler([&] {
    for (size_t i = 0; !done; ++i) EXPECT_TRUE((*table)->put(1, sessions[i % 2]).ok());
  });
  for (int i = 0; i < 10000 && !::testing::Test::HasFailure(); ++i) {
    const std::vector<std::byte> found = caller.attend(**table, slot_1.get());
    EXPECT_TRUE(found == answers[0] || found == answers[1]) << "call " << i << " is of both";
  }
  done = true;
  filler.join();
}

}  // namespace
}  // namespace sqz::cuda
