"""Functions of torch that compute no numbers, by name: what is not recorded by default, and never executed again.

Read by `catalogue` and by `replay`. Imports nothing, so that a replay needs no native core.
"""

from __future__ import annotations

QUERIES = frozenset(
    """
    size dim ndimension stride storage_offset numel nelement element_size itemsize nbytes is_contiguous
    is_floating_point is_complex is_signed is_nonzero is_same_size is_set_to is_shared is_pinned is_inference
    is_coalesced is_conj is_neg is_tensor device is_storage is_distributed has_names get_device data_ptr storage
    untyped_storage storage_type typed_storage tolist item numpy equal allclose __len__ __bool__ __float__
    __int__ __index__ __complex__ __contains__ __repr__ __str__ __format__ __hash__ __dir__ __deepcopy__
    __reduce__ __reduce_ex__ __setstate__ __array__ __array_wrap__ __dlpack__ __dlpack_device__
    __cuda_array_interface__ __iter__ register_hook register_post_accumulate_grad_hook retain_grad
    requires_grad_ backward detach detach_ alias as_subclass share_memory_ pin_memory names rename refine_names
    result_type can_cast promote_types broadcast_shapes is_grad_enabled set_grad_enabled _set_grad_enabled
    is_autocast_enabled set_default_dtype get_default_dtype manual_seed seed initial_seed get_rng_state
    set_rng_state _assert_async _assert_tensor_metadata _is_zerotensor _version
    """.split()  # noqa: SIM905 - a list of a hundred quoted words is harder to read
)
"""They query a tensor, or implement Python's protocols. They compute no numbers."""

UNFILLED = frozenset(
    """
    empty empty_like empty_strided empty_permuted empty_quantized new_empty new_empty_strided new resize_
    resize_as_ resize_as_sparse_ set_
    """.split()  # noqa: SIM905 - a list of a hundred quoted words is harder to read
)
"""What they return holds whatever lay there before."""
