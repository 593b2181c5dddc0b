// `sqz-index build --manifest`: one index a document, and no document that stops the others.
#pragma once

#include "tools/common/tool.h"
#include "tools/sqz_index/build_options.h"

namespace sqz {

// kIo if some documents failed, kCorrupt if all did.
Status build_from_manifest(const BuildArguments& arguments, const ToolContext& context);

}  // namespace sqz
