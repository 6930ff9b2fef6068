#include "indexer/launch.cuh"

namespace indexcache::indexer {

template void run_logits<64>(const Operands&, int, const LogitsOutput&, const Place&);
template void run_select<64>(const Operands&, const SelectOutput&, const Place&);

}  // namespace indexcache::indexer
