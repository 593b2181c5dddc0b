#include "options.h"

#include <algorithm>
#include <boost/program_options.hpp>
#include <cctype>
#include <fstream>
#include <iostream>
#include <map>
#include <stdexcept>

namespace embed {
namespace {

namespace po = boost::program_options;

const std::map<std::string, int32_t> kSelectors = {{"auto", SQZ_SELECTOR_AUTO},
                                                   {"squeezed", SQZ_SELECTOR_SQUEEZED},
                                                   {"dense", SQZ_SELECTOR_DENSE}};
const std::map<std::string, int32_t> kRules = {{"budget", SQZ_RULE_BUDGET},
                                               {"threshold", SQZ_RULE_THRESHOLD}};

int32_t named(const std::map<std::string, int32_t>& names, const po::variables_map& given,
              const std::string& option) {
  const auto& value = given[option].as<std::string>();
  const auto found = names.find(value);
  if (found != names.end()) return found->second;
  std::string expected;
  for (const auto& [name, unused] : names) expected += (expected.empty() ? "" : " or ") + name;
  throw std::runtime_error("--" + option + ": found " + value + ", expected " + expected);
}

// What may stand in an INI file and, as SQZ_NAME, in the environment.
// Flags take no value on the command line and one everywhere else.
po::options_description settings(bool on_command_line) {
  const auto flag = [&] {
    return on_command_line ? po::bool_switch() : po::value<bool>()->default_value(false);
  };
  po::options_description out("Settings");
  out.add_options()                                                                //
      ("capture", po::value<std::string>(), "queries from a capture file (HDF5)")  //
      ("format", po::value<std::string>()->default_value("text"),
       "queries from standard input: text (numbers) or f32 (raw, little-endian)")  //
      ("layer", po::value<int64_t>()->default_value(-1),
       "layer to serve; -1: all of a capture, 0 from standard input")  //
      ("selector", po::value<std::string>()->default_value("auto"),
       "squeezed, dense, or auto: what the index was built for")  //
      ("rule", po::value<std::string>()->default_value("budget"),
       "budget or threshold")  //
      ("budget", po::value<double>()->default_value(0.125),
       "fraction of the fixed context's bytes to read")                                 //
      ("levels", po::value<int32_t>()->default_value(0), "levels of the tree; 0: all")  //
      ("block", po::value<int64_t>()->default_value(0),
       "query tokens that share a selection; 0: all")                                   //
      ("threads", po::value<int32_t>()->default_value(0), "CPU threads; 0: all cores")  //
      ("read", flag(),
       "read the index into memory instead of mapping it")  //
      ("compare", flag(),
       "also serve densely and print the error: |sparse - dense| / |dense| of the outputs");
  return out;
}

void store_environment(const po::options_description& known, po::variables_map& given) {
  const auto name_of = [&](const std::string& variable) -> std::string {
    if (variable.rfind("SQZ_", 0) != 0) return "";
    std::string name = variable.substr(4);
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) {
      return c == '_' ? '-' : static_cast<char>(std::tolower(c));
    });
    return known.find_nothrow(name, false) != nullptr ? name : "";
  };
  po::store(po::parse_environment(known, name_of), given);
}

void store_file(const std::string& path, const po::options_description& known,
                po::variables_map& given) {
  std::ifstream file(path);
  if (!file) throw std::runtime_error(path + ": cannot be read");
  try {
    po::store(po::parse_config_file(file, known), given);
  } catch (const po::error& error) {
    throw std::runtime_error(path + ": " + error.what());
  }
}

Options to_options(const po::variables_map& given) {
  Options out;
  out.index = given["index"].as<std::string>();
  if (given.count("capture") != 0) out.capture = given["capture"].as<std::string>();
  out.format = given["format"].as<std::string>();
  if (out.format != "text" && out.format != "f32") {
    throw std::runtime_error("--format: found " + out.format + ", expected text or f32");
  }
  out.layer = given["layer"].as<int64_t>();
  out.compare = given["compare"].as<bool>();
  out.read = given["read"].as<bool>();
  sqz_session_options& session = out.session;
  session.struct_size = sizeof(session);
  session.selector = named(kSelectors, given, "selector");
  session.rule = named(kRules, given, "rule");
  if (session.selector != SQZ_SELECTOR_DENSE) session.budget = given["budget"].as<double>();
  session.levels = given["levels"].as<int32_t>();
  session.block = given["block"].as<int64_t>();
  session.threads = given["threads"].as<int32_t>();
  return out;
}

}  // namespace

std::optional<Options> parse_options(int argc, const char* const* argv) {
  const po::options_description known = settings(true), elsewhere = settings(false);
  po::options_description line("Command line");
  line.add_options()("help,h", "print this and exit")("config", po::value<std::string>(),
                                                      "INI file of settings: NAME = VALUE")(
      "index", po::value<std::string>(), "the index (.sqz); may also be given without --index");
  po::options_description all;
  all.add(line).add(known);
  po::positional_options_description position;
  position.add("index", 1);

  po::variables_map given;
  po::store(po::command_line_parser(argc, argv).options(all).positional(position).run(), given);
  if (given.count("help") != 0) {
    std::cout << "Serves attention over a fixed context from an index, without a model.\n"
                 "usage: embed INDEX.sqz [OPTIONS]\n\n"
              << all
              << "\nEvery setting may also be given as a variable (SQZ_BUDGET for --budget) or in "
                 "the INI file;\nthe command line wins, then the environment.\n";
    return std::nullopt;
  }
  store_environment(elsewhere, given);
  if (given.count("config") != 0) store_file(given["config"].as<std::string>(), elsewhere, given);
  po::notify(given);
  if (given.count("index") == 0) throw std::runtime_error("no index was given; see --help");
  return to_options(given);
}

}  // namespace embed
