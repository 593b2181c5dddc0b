// Profiles of layers against values from transformers (scripts/make_goldens.py profile).
#include <gmock/gmock.h>

#include "tests/common/json.h"
#include "tests/common/must.h"
#include "tests/training/golden.h"
#include "training/profile.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

class Profile : public ::testing::Test {
 protected:
  void SetUp() override {
    const std::string path = SQZ_SOURCE_DIR "/tests/golden/profile.json";
    const auto text = must(read_text_file(Env::posix(), path));
    golden_ = Json::parse(text);
    for (const Json& tokens : golden_["texts"]) {
      texts_.push_back({concat("text", texts_.size()), tokens.get<std::vector<int32_t>>()});
    }
    options_.window = golden_["window"];
    options_.windows = 0;
    runner_ = load_runner(nano_folder());
  }

  std::string refused(std::span<const TokenText> texts, const ProfileOptions& options,
                      Code code) const {
    const auto profile = profile_layers(*runner_, texts, options);
    EXPECT_EQ(profile.status().code(), code) << profile.status().message();
    return profile.status().message();
  }

  Json golden_;
  std::vector<TokenText> texts_;
  ProfileOptions options_;
  std::unique_ptr<Runner> runner_;
};

TEST_F(Profile, MeansAndErrorsAreThoseOfTransformers) {
  const auto profile = must(profile_layers(*runner_, texts_, options_));
  EXPECT_EQ(profile.tokens, 1050);
  EXPECT_EQ(profile.windows, 5);
  ASSERT_EQ(profile.cosine.size(), 6u);
  ASSERT_EQ(profile.cosine_error.size(), 6u);
  for (size_t l = 0; l < 6; ++l) {
    EXPECT_NEAR(profile.cosine[l], golden_["cosine"][l].get<double>(), 2e-5) << "layer " << l;
    EXPECT_NEAR(profile.cosine_error[l], golden_["cosine_error"][l].get<double>(), 5e-6)
        << "layer " << l;
  }
}

TEST_F(Profile, AskedForOneWindowItTakesTheFirstOfEachText) {
  options_.windows = 1;
  const auto first = must(profile_layers(*runner_, texts_, options_));
  EXPECT_EQ(first.windows, 2);
  EXPECT_EQ(first.tokens, 600);
  for (TokenText& text : texts_) text.tokens.resize(300);
  options_.windows = 0;
  const auto cut = must(profile_layers(*runner_, texts_, options_));
  EXPECT_EQ(first.cosine, cut.cosine);
  EXPECT_EQ(first.cosine_error, cut.cosine_error);
}

TEST_F(Profile, RefusesWhatItCannotAverage) {
  std::vector<TokenText> short_text = {{"a.txt", texts_[0].tokens}};
  short_text[0].tokens.resize(255);
  EXPECT_THAT(refused(short_text, options_, Code::kCorrupt),
              HasSubstr("a.txt: text: found 255 tokens, expected at least 256"));
  EXPECT_THAT(refused({}, options_, Code::kCorrupt), HasSubstr("found 0 tokens"));

  std::vector<TokenText> foreign = texts_;
  foreign[1].tokens[7] = 8192;
  EXPECT_THAT(refused(foreign, options_, Code::kInvalidArgument), HasSubstr("8192"));
}

}  // namespace
}  // namespace sqz
