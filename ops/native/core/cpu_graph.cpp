// The C functions through which cpu_graph.py makes, fills and replays a CpuGraph.
#include "core/cpu_graph.h"

namespace ostinato {
namespace {

// The error of this thread's last failed replay.
std::string& last_error() {
  thread_local std::string text;
  return text;
}

}  // namespace
}  // namespace ostinato

OSTINATO_EXPORT ostinato::CpuGraph* ostinato_graph_new() { return new ostinato::CpuGraph; }
OSTINATO_EXPORT void ostinato_graph_delete(ostinato::CpuGraph* graph) { delete graph; }
OSTINATO_EXPORT int64_t ostinato_graph_constant(ostinato::CpuGraph* graph, void* data, int32_t dtype, int64_t dim,
                                                const int64_t* sizes, const int64_t* strides) {
  return graph->add_tensor(data, static_cast<ostinato::DType>(dtype), dim, sizes, strides);
}
OSTINATO_EXPORT int64_t ostinato_graph_input(ostinato::CpuGraph* graph, int32_t dtype, int64_t dim,
                                             const int64_t* sizes) {
  return graph->add_input(static_cast<ostinato::DType>(dtype), dim, sizes);
}
OSTINATO_EXPORT int64_t ostinato_graph_call(ostinato::CpuGraph* graph, ostinato::Kernel kernel, const char* name,
                                            const ostinato::Argument* arguments, int64_t count, int64_t num_results) {
  return graph->add_call(kernel, name, arguments, count, num_results);
}
OSTINATO_EXPORT int64_t ostinato_graph_compiled(ostinato::CpuGraph* graph, ostinato::CompiledEntry entry,
                                                void* container, const char* name, const int64_t* inputs,
                                                int64_t num_inputs, int64_t num_outputs) {
  return graph->add_compiled(entry, container, name, inputs, num_inputs, num_outputs);
}
OSTINATO_EXPORT int64_t ostinato_graph_view(ostinato::CpuGraph* graph, int64_t source, const int64_t* sizes,
                                            int64_t dim) {
  return graph->add_view(source, sizes, dim);
}
OSTINATO_EXPORT int64_t ostinato_graph_slice(ostinato::CpuGraph* graph, int64_t source, int64_t first,
                                             int64_t length) {
  return graph->add_slice(source, first, length);
}
OSTINATO_EXPORT int64_t ostinato_graph_index_select(ostinato::CpuGraph* graph, int64_t matrix, int64_t row_numbers) {
  return graph->add_index_select(matrix, row_numbers);
}
OSTINATO_EXPORT void ostinato_graph_begin_layer(ostinato::CpuGraph* graph) { graph->begin_layer(); }
OSTINATO_EXPORT void ostinato_graph_result(ostinato::CpuGraph* graph, int64_t slot) { graph->set_result(slot); }

// Returns null, or the text of the error.
OSTINATO_EXPORT const char* ostinato_graph_replay(ostinato::CpuGraph* graph, int64_t num_tokens, int64_t num_seqs,
                                                  int64_t num_rows, int32_t profile, void* const* inputs, void* out) {
  try {
    graph->replay({num_tokens, num_seqs, num_rows, profile != 0}, inputs, out);
    return nullptr;
  } catch (const std::exception& error) {
    ostinato::last_error() = error.what();
    return ostinato::last_error().c_str();
  }
}
