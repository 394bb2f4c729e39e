// Enough of libopapi.so for torch_npu to believe that it may batch copies (it asks whether aclnnForeachCopy exists). A
// kernel behind these names can not run here: whoever reaches one has left what is simulated.

#include <cstdio>
#include <cstdlib>

#define KERNEL(name)                                                                            \
    extern "C" int name() {                                                                     \
        std::fputs("npu_sim: " #name " is a kernel, and kernels are not simulated\n", stderr);  \
        std::abort();                                                                           \
    }

KERNEL(aclnnForeachCopyGetWorkspaceSize)
KERNEL(aclnnForeachCopy)
KERNEL(aclnnInplaceCopyGetWorkspaceSize)
KERNEL(aclnnInplaceCopy)
