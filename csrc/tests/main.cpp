#include <cstdio>
#include <cstring>

#include "tests/check.h"
#include "tests/throughput.h"

// Runs every test; `--benchmark` prints the scheduler's cost per action instead.
int main(int argc, char** argv) {
  if (argc > 1 && std::strcmp(argv[1], "--benchmark") == 0) {
    timelyfreeze::testing::print_cost_per_action();
    return 0;
  }
  int passed = 0;
  for (const auto& [name, body] : timelyfreeze::testing::tests()) {
    std::printf("%s\n", name.c_str());
    std::fflush(stdout);
    body();
    ++passed;
  }
  std::printf("%d passed, 0 failed\n", passed);
  return passed > 0 ? 0 : 1;
}
