// The functions of torch's stable C ABI (torch >= 2.11) that the kernels call.
//
// They are declared here because torch's own header includes C++ headers that every unit of a library would parse for
// half a second. tests/ops/test_native_build.py compiles both headers together: the compiler refuses a declaration that
// differs from torch's.
#pragma once

#include <cstddef>
#include <cstdint>

#pragma GCC visibility push(default)

struct AtenTensorOpaque;
struct AtenRecordFunctionOpaque;
struct C10IValueOpaque;
struct IValueMapOpaque;
struct StringOpaque;
class TorchLibraryOpaque;
using AtenTensorHandle = AtenTensorOpaque*;
using AtenRecordFunctionHandle = AtenRecordFunctionOpaque*;
using C10IValueHandle = C10IValueOpaque*;
using IValueMapHandle = IValueMapOpaque*;
using AOTITorchError = int32_t;
using StableIValue = uint64_t;
using StringHandle = StringOpaque*;
using TorchLibraryHandle = TorchLibraryOpaque*;
using ParallelFunc = void (*)(int64_t begin, int64_t end, void* context);

extern "C" {
int32_t aoti_torch_dtype_uint8();
int32_t aoti_torch_dtype_int8();
int32_t aoti_torch_dtype_int32();
int32_t aoti_torch_dtype_int64();
int32_t aoti_torch_dtype_float16();
int32_t aoti_torch_dtype_float32();
int32_t aoti_torch_dtype_float64();
int32_t aoti_torch_dtype_bfloat16();

AOTITorchError aoti_torch_get_data_ptr(AtenTensorHandle tensor, void** data);
AOTITorchError aoti_torch_get_sizes(AtenTensorHandle tensor, int64_t** sizes);
AOTITorchError aoti_torch_get_strides(AtenTensorHandle tensor, int64_t** strides);
AOTITorchError aoti_torch_get_dim(AtenTensorHandle tensor, int64_t* dim);
AOTITorchError aoti_torch_get_dtype(AtenTensorHandle tensor, int32_t* dtype);
AOTITorchError aoti_torch_empty_strided(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype,
                                        int32_t device_type, int32_t device_index, AtenTensorHandle* result);
AOTITorchError aoti_torch_create_tensor_from_blob(void* data, int64_t dim, const int64_t* sizes,
                                                  const int64_t* strides, int64_t storage_offset, int32_t dtype,
                                                  int32_t device_type, int32_t device_index, AtenTensorHandle* result);
AOTITorchError aoti_torch_delete_tensor_object(AtenTensorHandle tensor);

AOTITorchError torch_string_c_str(StringHandle text, const char** characters);
AOTITorchError torch_string_length(StringHandle text, size_t* length);
AOTITorchError torch_delete_string(StringHandle text);

AOTITorchError torch_get_num_threads(uint32_t* count);
AOTITorchError torch_parallel_for(int64_t begin, int64_t end, int64_t grain_size, ParallelFunc body, void* context);

AOTITorchError aoti_record_function_start(const char* name, IValueMapHandle keywords, const C10IValueHandle* inputs,
                                          const uint64_t num_inputs, AtenRecordFunctionHandle* record);
AOTITorchError aoti_record_function_end(AtenRecordFunctionHandle record);

AOTITorchError torch_call_dispatcher(const char* op, const char* overload, StableIValue* stack, uint64_t abi_version);
AOTITorchError aoti_torch_library_init_impl(const char* name_space, const char* dispatch_key, const char* file,
                                            uint32_t line, TorchLibraryHandle* result);
AOTITorchError torch_library_impl(TorchLibraryHandle library, const char* op,
                                  void (*kernel)(StableIValue*, uint64_t, uint64_t), uint64_t abi_version);
}

#pragma GCC visibility pop
