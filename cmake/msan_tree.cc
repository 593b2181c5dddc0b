// MemorySanitizer does not see the code of libstdc++.so link a node into the tree of a std::map or
// std::set, so that this says it (preset msan, by the linker's --wrap).
#include <sanitizer/msan_interface.h>

#include <map>

using Node = std::_Rb_tree_node_base;
#define SQZ_INSERT(prefix) prefix##_ZSt29_Rb_tree_insert_and_rebalancebPSt18_Rb_tree_node_baseS0_RS_

extern "C" {

void SQZ_INSERT(__real_)(bool left, Node* node, Node* parent, Node& header) noexcept;

void SQZ_INSERT(__wrap_)(bool left, Node* node, Node* parent, Node& header) noexcept {
  SQZ_INSERT(__real_)(left, node, parent, header);
  __msan_unpoison(node, sizeof(*node));
}

}  // extern "C"
