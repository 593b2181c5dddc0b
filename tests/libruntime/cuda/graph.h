// A call that was captured, to be replayed.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "libruntime/session/serving_session.h"

namespace sqz::cuda::test {

class CapturedCall {
 public:
  // Captures `times` calls on a stream of its own.
  CapturedCall(ServingSession& session, AttendCall call, int times) {
    EXPECT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
    call.stream = stream_;
    EXPECT_EQ(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    for (int i = 0; i < times; ++i) EXPECT_TRUE(session.attend(call).ok());
    EXPECT_EQ(cudaStreamEndCapture(stream_, &graph_), cudaSuccess);
    EXPECT_EQ(cudaGraphInstantiate(&executable_, graph_, 0), cudaSuccess);
  }
  ~CapturedCall() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
    cudaStreamDestroy(stream_);
  }
  CapturedCall(const CapturedCall&) = delete;
  CapturedCall& operator=(const CapturedCall&) = delete;

  void replay() const {
    EXPECT_EQ(cudaGraphLaunch(executable_, stream_), cudaSuccess);
    EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace sqz::cuda::test
