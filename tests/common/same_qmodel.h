// Two query classifiers, number by number.
#pragma once

#include <gtest/gtest.h>

#include "formats/qmodel_file.h"

namespace sqz::testing {

inline void expect_same_layers(const QmodelFile& a, const QmodelFile& b) {
  ASSERT_EQ(a.layers.size(), b.layers.size());
  for (size_t l = 0; l < a.layers.size(); ++l) {
    EXPECT_EQ(a.layers[l].centroids, b.layers[l].centroids) << l;
    EXPECT_EQ(a.layers[l].hidden_weight, b.layers[l].hidden_weight) << l;
    EXPECT_EQ(a.layers[l].hidden_bias, b.layers[l].hidden_bias) << l;
    EXPECT_EQ(a.layers[l].output_weight, b.layers[l].output_weight) << l;
    EXPECT_EQ(a.layers[l].output_bias, b.layers[l].output_bias) << l;
  }
}

}  // namespace sqz::testing
