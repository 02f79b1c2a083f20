// Checks every kernel of every instruction set that this CPU runs. Needs no Python.
//
//   streamkv_selftest [instruction set...]     all of them if none is named
//
// Ends with 0 if all holds. Weights and caches belong to the table that packed them, so none
// outlives its check.
#include <stdio.h>

#include <exception>
#include <string>
#include <vector>

#include "selftest.h"

namespace {

using namespace streamkv;
using namespace streamkv::selftest;

struct Check {
  const char* name;
  void (*run)(Report& report);
};

constexpr Check kChecks[] = {
    {"packing", check_packing},     {"products", check_products},
    {"quantized", check_quantized}, {"elementwise", check_elementwise},
    {"attention", check_attention}, {"masks", check_masks},
    {"runner", check_runner},       {"sampling", check_sampling},
    {"team", check_team},
};

bool check_isa(const std::string& isa) {
  set_isa(isa.c_str());
  bool holds = true;
  for (const Check& check : kChecks) {
    Report report(isa.c_str());
    check.run(report);
    printf("%s: %s: %lld checks, %lld failed\n", isa.c_str(), check.name,
           static_cast<long long>(report.num_checks()),
           static_cast<long long>(report.num_failures()));
    fflush(stdout);
    holds = holds && report.num_checks() > 0 && report.num_failures() == 0;
  }
  return holds;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> isas(argv + 1, argv + argc);
  if (isas.empty())
    for (int i = 0; i < num_available_isas(); ++i) isas.push_back(available_isa(i));
  try {
    bool holds = true;
    for (const std::string& isa : isas) holds = check_isa(isa) && holds;
    puts(holds ? "selftest: all holds" : "selftest: FAILED");
    return holds ? 0 : 1;
  } catch (const std::exception& error) {
    fprintf(stderr, "selftest: %s\n", error.what());
    return 2;
  }
}
