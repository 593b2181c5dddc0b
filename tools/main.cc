// The program of every tool: SQZ_TOOL_MAIN is its function.
#include "tools/common/mains.h"

int main(int argc, char** argv) {
  return sqz::SQZ_TOOL_MAIN(argc, argv);
}
