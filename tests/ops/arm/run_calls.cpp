// Runs kernel calls that a file describes, without torch: on a processor that the test machine only emulates.
//
//   run_calls TEXT DATA OUT
//
// Each line of TEXT is one of
//   tensor DTYPE_CODE OFFSET SIZE...   a contiguous tensor in DATA, numbered from 0 on
//   none | integer VALUE | number VALUE | text VALUE | slot TENSOR   the next argument of the call
//   call KERNEL RESULT_BYTES...        a call with these arguments, and the bytes of its results
// OUT receives the results of all calls, then all tensors, which calls may have written to.
#include "core/cpu_graph.h"

#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>

extern "C" void* ostinato_kernel(const char* name);
extern "C" void ostinato_set_pool_threads(int count);

namespace {

struct Described {
  ostinato::DType dtype;
  std::vector<int64_t> sizes;
  char* data;
  int64_t bytes;
};

int64_t bytes_of(const Described& tensor) {
  int64_t count = ostinato::element_size(tensor.dtype);
  for (int64_t size : tensor.sizes) count *= size;
  return count;
}

}  // namespace

int main(int, char** paths) {
  ostinato_set_pool_threads(2);
  std::ifstream text(paths[1]);
  std::ifstream file(paths[2], std::ios::binary);
  std::vector<char> data((std::istreambuf_iterator<char>(file)), {});
  std::vector<Described> tensors;
  std::vector<ostinato::Argument> arguments;
  std::deque<std::string> texts;
  std::ofstream out(paths[3], std::ios::binary);
  for (std::string line; std::getline(text, line);) {
    std::istringstream words(line);
    std::string kind;
    words >> kind;
    ostinato::Argument argument{ostinato::Argument::none, 0, 0.0, nullptr};
    if (kind == "tensor") {
      int32_t code;
      int64_t offset;
      words >> code >> offset;
      Described tensor{static_cast<ostinato::DType>(code), {}, data.data() + offset, 0};
      for (int64_t size; words >> size;) tensor.sizes.push_back(size);
      tensor.bytes = bytes_of(tensor);
      tensors.push_back(tensor);
      continue;
    }
    if (kind == "call") {
      std::string name;
      words >> name;
      std::vector<int64_t> results((std::istream_iterator<int64_t>(words)), {});
      std::vector<char> result;
      // A kernel without results is called too. Its graph returns the first tensor, which it may have written to.
      const bool has_results = !results.empty();
      if (!has_results) results.push_back(tensors[0].bytes);
      for (size_t i = 0; i < results.size(); ++i) {
        ostinato::CpuGraph graph;
        for (const Described& tensor : tensors) {
          graph.add_tensor(tensor.data, tensor.dtype, tensor.sizes.size(), tensor.sizes.data(), nullptr);
        }
        auto* kernel = reinterpret_cast<ostinato::Kernel>(ostinato_kernel(name.c_str()));
        if (kernel == nullptr) {
          std::cerr << "no kernel " << name << "\n";
          return 1;
        }
        const int64_t first =
            graph.add_call(kernel, name.c_str(), arguments.data(), arguments.size(), has_results ? results.size() : 0);
        graph.set_result(has_results ? first + i : 0);
        result.resize(results[i]);
        try {
          graph.replay({1, 1, 1, false}, nullptr, result.data());
        } catch (const std::exception& error) {
          std::cerr << name << ": " << error.what() << "\n";
          return 1;
        }
        if (has_results) out.write(result.data(), result.size());
      }
      arguments.clear();
      continue;
    }
    if (kind == "slot" || kind == "integer") {
      argument.kind = kind == "slot" ? ostinato::Argument::tensor : ostinato::Argument::integer;
      words >> argument.integer_value;
    } else if (kind == "number") {
      argument.kind = ostinato::Argument::number;
      words >> argument.number_value;
    } else if (kind == "text") {
      argument.kind = ostinato::Argument::text;
      words >> texts.emplace_back();
      argument.text_value = texts.back().c_str();
    }
    arguments.push_back(argument);
  }
  for (const Described& tensor : tensors) out.write(tensor.data, tensor.bytes);
  return 0;
}
