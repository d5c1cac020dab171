"""Kernels' names, as profilers on NVIDIA and AMD write them, and what each of them does."""

import re
from pathlib import Path

import pytest

from workshop.profilers.categories import CATEGORIES, categorize

ROOT = Path(__file__).resolve().parents[1]

NAMES = {
    "GEMM": (
        "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize2x1x1_cublas",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_nn>",
        "_ZN7cutlass13device_kernelINS_4gemm6kernel13GemmUniversalIN4cute5tupleIJiiiiEEEEEEvNT_6ParamsE",
        "ampere_sgemm_32x32_sliced1x4_tn",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, false>(int)",
        "void gemv2T_kernel_val<int, int, float, float, float, 128, 16, 4, 4, false>(int, float)",
        "Cijk_Ailk_Bjlk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64_MI16x16x1_SN_LDSB1_GRVWA8",
        "_ZN2ck16kernel_gemm_xdl_cshuffle_v3INS_48GridwiseGemm_xdl_cshuffle_v3EEEvT_",
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw",
        "cudnn_ampere_scudnn_128x64_relu_xregs_large_nn_v1",
        "bmm_Bfloat16_E2m1E2m1_Fp32_t128x8x512u2_s4_et64x8_m128x8x64_rM_TN_transOut_sm100f",
        "aten::mm",
        "aten::linear",
        "aten::_scaled_mm",
        "mkldnn::_linear_pointwise",
        "aten::convolution_backward",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp16_dot2_edc_f2x3_stride1",
        "naive_conv_nonpacked_wrw_nchw_half_double_half",
    ),
    "attention": (
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_128x128x64_4x1x1_cga1",
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128>>",
        "_ZN13pytorch_flash44flash_bwd_dq_dk_dv_loop_seqk_parallel_kernelINS_23Flash_bwd_kernelEEEv",
        "void cutlass::device_kernel<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwd>>",
        "sage_fwd",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass>)",
        "_ZN7ck_tile6kentryILi256ELi2ENS_13FmhaFwdKernelINS_32BlockFmhaPipelineQRKSVSEEEEEvT2_",
        "bwd_kernel_dq",
        "triton_tem_fused_flex_attention_backward_zeros_1",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
        "tiny_llama::flash_attention",
    ),
    "norm": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float, true>",
        "_ZN2at6native54_GLOBAL__N__bf4d3b1a_20_layer_norm_kernel_cu_9c5ada8a28vectorized_layer_norm",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, float>",
        "void at::native::(anonymous namespace)::ComputeInternalGradientsCUDAKernel<float>(long)",
        "void cuApplyRMSNorm<c10::BFloat16, float, c10::BFloat16>(c10::BFloat16*, float*)",
        "triton_per_fused__fused_rms_norm_add_0",
        # Only the names of its neighbour's operators are in it.
        "triton_red_fused__fused_rms_norm__scaled_dot_product_flash_attention_add_cat_mul_3",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_5",
        "cpp_fused__to_copy_add_mean_mul_pow_rsqrt_0",
    ),
    "elementwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>",
        "_ZN2at6native29vectorized_elementwise_kernelILi4ENS0_11FillFunctorIfEESt5arrayIPcLm1EEEEviT0_T1_",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps>>",
        "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIN3c108BFloat16EEEEEvT1_",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>",
        "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<float>",
        # Random numbers from a normal distribution, no norm.
        "_ZN2at6native54_GLOBAL__N__d8ceb000_21_DistributionNormal_cu_0c5b6e8543distribution_elementwise",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<float, float, int>",
        "triton_per_fused__log_softmax_backward_data_nll_loss_backward_nll_loss_forward_2",
        "triton_red_fused_mm_sum_3",
        "_ZN2at6native12_GLOBAL__N_121max_pool_forward_nchwIffEEviPKT_lllliiiiiiiiiPS3_Pl",
        "void at::native::(anonymous namespace)::adaptive_average_pool<float>(float const*)",
        "mloPoolingForwardNaive",
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*)",
        "SubTensorOpWithScalar1d",
        "void at::native::(anonymous namespace)::upsample_nearest2d_out_frame<c10::BFloat16>(int)",
        "void at::native::col2im_batched_kernel<float, float>(long, float const*, long, long)",
        "aten::max_pool2d_with_indices",
        "tiny_llama::rope_qkv_backward",
    ),
    "optimizer": (
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
        "namespace)::TensorListMetadata<2>, at::native::LerpFunctor<float>, float>",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous "
        "namespace)::FusedOptimizerTensorListMetadata<4>, FusedAdamMathFunctor<float, 4>>",
        "_ZN2at6native12_GLOBAL__N_125multi_tensor_apply_kernelINS1_18TensorListMetadataILi1EEEEEvT_",
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<LpNormFunctor<float>>",
        "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float>",
        "triton_for_fused_0",
        "aten::_fused_adamw_",
        "aten::addcmul_",
        "Optimizer.step#AdamW.step",
    ),
    "copy": (
        "Memcpy HtoD (Pageable -> Device)",
        "Memset (Device)",
        "[CUDA memcpy Host-to-Device]",
        "__amd_rocclr_copyBuffer",
        "MEMORY_COPY_DEVICE_TO_HOST",
        "void at::native::elementwise_kernel<128, 4, at::native::direct_copy_kernel_cuda()>",
        "_ZN2at6native29vectorized_elementwise_kernelILi8EZNS0_25bfloat16_copy_kernel_cudaERNS_18Tensor",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, unsigned int, 4>",
        "void cudnn::ops::nchwToNhwcKernel<float, float, float, false, true>",
        "batched_transpose_32x32_half",
        "SubTensorOpWithCastTensor1d",
        "Im2d2Col_v2",
        "void at::native::im2col_kernel<float>(long, float const*, long, long, long, long)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char>(__nv_bfloat16*)",
        "aten::copy_",
        "aten::cat",
    ),
    "communication": (
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "Memcpy PtoP (Device -> Device)",
        "[CUDA memcpy Peer-to-Peer]",
        "c10d::symmetric_memory::barrier_kernel(unsigned int**, int, int, int, unsigned long)",
        "_Z47ncclDevKernel_AllGather_RING_LL24ncclDevKernelArgsStorageILm4096EE",
        "gloo:all_reduce",
        "c10d::allreduce_",
    ),
    "other": (
        "scale_kernel",
        "message_forward",  # no "sage_fwd"
        "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*, int, long, long)",
        "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float, float>",
        "void at::native::index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<Opaque>>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long, unsigned int>",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<at_cuda_detail::cub::Policy>",
        "aten::view",
        "MmBackward0",
        "autograd::engine::evaluate_function: MmBackward0",
        "cudaDeviceProperties_kernel",  # no "rope"
        "",
    ),
}


@pytest.mark.parametrize("category", CATEGORIES)
def test_names(category: str) -> None:
    wrong = {name: categorize(name) for name in NAMES[category] if categorize(name) != category}
    assert not wrong


OF_V3 = {"attention": "attention", "rms_norm": "norm", "matmul": "GEMM", "adamw": "optimizer",
         "float8_round": "copy", "embedding": "other"}  # fmt: skip
"""By a part of the kernel's name; all others are element-wise."""


def test_every_kernel_of_version_3_has_a_category() -> None:
    sources = (path.read_text() for path in (ROOT / "version3_triton").glob("triton_*.py"))
    kernels = {name for text in sources for name in re.findall(r"^def (_\w+_kernel)\(", text, re.M)}
    expected = {
        name: next((category for part, category in OF_V3.items() if part in name), "elementwise")
        for name in kernels
    }
    assert len(kernels) > 20 and {name: categorize(name) for name in kernels} == expected
