// The tools' main functions. The tests call them, too.
#pragma once

namespace sqz {

int eval_main(int argc, char** argv);
int generate_main(int argc, char** argv);
int index_main(int argc, char** argv);
int profile_layers_main(int argc, char** argv);
int train_qmodel_main(int argc, char** argv);

}  // namespace sqz
