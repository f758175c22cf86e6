from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ExpectReuse(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EXPECT_REUSE_UNSPECIFIED: _ClassVar[ExpectReuse]
    EXPECT_REUSE_NONE: _ClassVar[ExpectReuse]
    EXPECT_REUSE_LIKELY: _ClassVar[ExpectReuse]
    EXPECT_REUSE_CERTAIN: _ClassVar[ExpectReuse]

class BlockOutcome(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BLOCK_OUTCOME_REJECTED: _ClassVar[BlockOutcome]
    BLOCK_OUTCOME_WANTED: _ClassVar[BlockOutcome]
    BLOCK_OUTCOME_PRESENT: _ClassVar[BlockOutcome]
    BLOCK_OUTCOME_PENDING: _ClassVar[BlockOutcome]
    BLOCK_OUTCOME_STORED: _ClassVar[BlockOutcome]
EXPECT_REUSE_UNSPECIFIED: ExpectReuse
EXPECT_REUSE_NONE: ExpectReuse
EXPECT_REUSE_LIKELY: ExpectReuse
EXPECT_REUSE_CERTAIN: ExpectReuse
BLOCK_OUTCOME_REJECTED: BlockOutcome
BLOCK_OUTCOME_WANTED: BlockOutcome
BLOCK_OUTCOME_PRESENT: BlockOutcome
BLOCK_OUTCOME_PENDING: BlockOutcome
BLOCK_OUTCOME_STORED: BlockOutcome

class OpenSessionRequest(_message.Message):
    __slots__ = ("client_name", "protocol_minor", "staging_bytes", "join_token")
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    JOIN_TOKEN_FIELD_NUMBER: _ClassVar[int]
    client_name: str
    protocol_minor: int
    staging_bytes: int
    join_token: bytes
    def __init__(self, client_name: _Optional[str] = ..., protocol_minor: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., join_token: _Optional[bytes] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("token", "boot_id", "daemon_version", "protocol_minor", "role", "tenants", "staging_bytes", "session_ttl_seconds", "limits")
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DAEMON_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSION_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    token: bytes
    boot_id: str
    daemon_version: str
    protocol_minor: int
    role: str
    tenants: _containers.RepeatedScalarFieldContainer[str]
    staging_bytes: int
    session_ttl_seconds: float
    limits: Limits
    def __init__(self, token: _Optional[bytes] = ..., boot_id: _Optional[str] = ..., daemon_version: _Optional[str] = ..., protocol_minor: _Optional[int] = ..., role: _Optional[str] = ..., tenants: _Optional[_Iterable[str]] = ..., staging_bytes: _Optional[int] = ..., session_ttl_seconds: _Optional[float] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("message_bytes", "reserve_blocks", "leased_bytes", "reserved_bytes", "lease_ttl_seconds", "staging_ttl_seconds")
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    STAGING_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    message_bytes: int
    reserve_blocks: int
    leased_bytes: int
    reserved_bytes: int
    lease_ttl_seconds: float
    staging_ttl_seconds: float
    def __init__(self, message_bytes: _Optional[int] = ..., reserve_blocks: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., reserved_bytes: _Optional[int] = ..., lease_ttl_seconds: _Optional[float] = ..., staging_ttl_seconds: _Optional[float] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LaneError(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: str
    message: str
    def __init__(self, code: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class Notice(_message.Message):
    __slots__ = ("draining", "drain_seconds", "lost_leases")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DRAIN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOST_LEASES_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    drain_seconds: float
    lost_leases: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, draining: _Optional[bool] = ..., drain_seconds: _Optional[float] = ..., lost_leases: _Optional[_Iterable[int]] = ...) -> None: ...

class KVSpec(_message.Message):
    __slots__ = ("model", "revision", "num_layers", "layer_first", "num_kv_heads", "head_dim", "dtype", "block_size", "kv_factor", "layout", "block_bytes", "attention", "shard_count", "pp_size", "group", "kv_format", "key_mode", "hash_algorithm")
    class AttentionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIRST_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    KV_FACTOR_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_FIELD_NUMBER: _ClassVar[int]
    SHARD_COUNT_FIELD_NUMBER: _ClassVar[int]
    PP_SIZE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    KV_FORMAT_FIELD_NUMBER: _ClassVar[int]
    KEY_MODE_FIELD_NUMBER: _ClassVar[int]
    HASH_ALGORITHM_FIELD_NUMBER: _ClassVar[int]
    model: str
    revision: str
    num_layers: int
    layer_first: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    kv_factor: int
    layout: str
    block_bytes: int
    attention: _containers.ScalarMap[str, str]
    shard_count: int
    pp_size: int
    group: str
    kv_format: str
    key_mode: str
    hash_algorithm: str
    def __init__(self, model: _Optional[str] = ..., revision: _Optional[str] = ..., num_layers: _Optional[int] = ..., layer_first: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., dtype: _Optional[str] = ..., block_size: _Optional[int] = ..., kv_factor: _Optional[int] = ..., layout: _Optional[str] = ..., block_bytes: _Optional[int] = ..., attention: _Optional[_Mapping[str, str]] = ..., shard_count: _Optional[int] = ..., pp_size: _Optional[int] = ..., group: _Optional[str] = ..., kv_format: _Optional[str] = ..., key_mode: _Optional[str] = ..., hash_algorithm: _Optional[str] = ...) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("spec", "tenant", "shard", "plan_shapes", "overlap", "engine_id", "engine_build", "device", "prefill_chunk_tokens")
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PLAN_SHAPES_FIELD_NUMBER: _ClassVar[int]
    OVERLAP_FIELD_NUMBER: _ClassVar[int]
    ENGINE_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_BUILD_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    PREFILL_CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    spec: KVSpec
    tenant: str
    shard: int
    plan_shapes: _containers.RepeatedScalarFieldContainer[str]
    overlap: str
    engine_id: str
    engine_build: str
    device: str
    prefill_chunk_tokens: int
    def __init__(self, spec: _Optional[_Union[KVSpec, _Mapping]] = ..., tenant: _Optional[str] = ..., shard: _Optional[int] = ..., plan_shapes: _Optional[_Iterable[str]] = ..., overlap: _Optional[str] = ..., engine_id: _Optional[str] = ..., engine_build: _Optional[str] = ..., device: _Optional[str] = ..., prefill_chunk_tokens: _Optional[int] = ...) -> None: ...

class AttachResponse(_message.Message):
    __slots__ = ("attachment", "space_id", "epoch", "block_bytes", "slot_bytes", "pools")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_BYTES_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    space_id: bytes
    epoch: int
    block_bytes: int
    slot_bytes: int
    pools: _containers.RepeatedCompositeFieldContainer[Pool]
    def __init__(self, attachment: _Optional[int] = ..., space_id: _Optional[bytes] = ..., epoch: _Optional[int] = ..., block_bytes: _Optional[int] = ..., slot_bytes: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[Pool, _Mapping]]] = ...) -> None: ...

class Pool(_message.Message):
    __slots__ = ("pool_id", "name", "data_bytes", "generation_bytes")
    POOL_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_BYTES_FIELD_NUMBER: _ClassVar[int]
    GENERATION_BYTES_FIELD_NUMBER: _ClassVar[int]
    pool_id: int
    name: str
    data_bytes: int
    generation_bytes: int
    def __init__(self, pool_id: _Optional[int] = ..., name: _Optional[str] = ..., data_bytes: _Optional[int] = ..., generation_bytes: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("tokens", "hashes", "hash_bytes", "extra", "adapter", "cache_salt")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HASHES_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    EXTRA_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    hashes: bytes
    hash_bytes: int
    extra: _containers.RepeatedCompositeFieldContainer[ExtraKeys]
    adapter: str
    cache_salt: str
    def __init__(self, tokens: _Optional[bytes] = ..., hashes: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., extra: _Optional[_Iterable[_Union[ExtraKeys, _Mapping]]] = ..., adapter: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ExtraKeys(_message.Message):
    __slots__ = ("block", "digest")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    block: int
    digest: bytes
    def __init__(self, block: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class ReuseHints(_message.Message):
    __slots__ = ("session", "turn", "expect_reuse", "expect_reuse_seconds", "priority", "no_store")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    EXPECT_REUSE_FIELD_NUMBER: _ClassVar[int]
    EXPECT_REUSE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    NO_STORE_FIELD_NUMBER: _ClassVar[int]
    session: str
    turn: int
    expect_reuse: ExpectReuse
    expect_reuse_seconds: float
    priority: int
    no_store: bool
    def __init__(self, session: _Optional[str] = ..., turn: _Optional[int] = ..., expect_reuse: _Optional[_Union[ExpectReuse, str]] = ..., expect_reuse_seconds: _Optional[float] = ..., priority: _Optional[int] = ..., no_store: _Optional[bool] = ...) -> None: ...

class LoadHints(_message.Message):
    __slots__ = ("queued_prefill_tokens", "gpu_busy_ratio")
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GPU_BUSY_RATIO_FIELD_NUMBER: _ClassVar[int]
    queued_prefill_tokens: int
    gpu_busy_ratio: float
    def __init__(self, queued_prefill_tokens: _Optional[int] = ..., gpu_busy_ratio: _Optional[float] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("attachment", "request_id", "prompt", "local_tokens", "deadline_seconds", "load", "reuse")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    LOCAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    request_id: str
    prompt: Prompt
    local_tokens: int
    deadline_seconds: float
    load: LoadHints
    reuse: ReuseHints
    def __init__(self, attachment: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., local_tokens: _Optional[int] = ..., deadline_seconds: _Optional[float] = ..., load: _Optional[_Union[LoadHints, _Mapping]] = ..., reuse: _Optional[_Union[ReuseHints, _Mapping]] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("lease_id", "lease_ttl_seconds", "matched_tokens", "restore_tokens", "pending_tokens", "plan", "reason", "first_block", "slots")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    MATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PLAN_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_ttl_seconds: float
    matched_tokens: int
    restore_tokens: int
    pending_tokens: int
    plan: Plan
    reason: str
    first_block: int
    slots: SlotRuns
    def __init__(self, lease_id: _Optional[int] = ..., lease_ttl_seconds: _Optional[float] = ..., matched_tokens: _Optional[int] = ..., restore_tokens: _Optional[int] = ..., pending_tokens: _Optional[int] = ..., plan: _Optional[_Union[Plan, _Mapping]] = ..., reason: _Optional[str] = ..., first_block: _Optional[int] = ..., slots: _Optional[_Union[SlotRuns, _Mapping]] = ...) -> None: ...

class Plan(_message.Message):
    __slots__ = ("kind", "steps", "predicted_p50_seconds", "predicted_p99_seconds")
    KIND_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    steps: _containers.RepeatedCompositeFieldContainer[PlanStep]
    predicted_p50_seconds: float
    predicted_p99_seconds: float
    def __init__(self, kind: _Optional[str] = ..., steps: _Optional[_Iterable[_Union[PlanStep, _Mapping]]] = ..., predicted_p50_seconds: _Optional[float] = ..., predicted_p99_seconds: _Optional[float] = ...) -> None: ...

class PlanStep(_message.Message):
    __slots__ = ("first_token", "token_count", "source")
    FIRST_TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    first_token: int
    token_count: int
    source: str
    def __init__(self, first_token: _Optional[int] = ..., token_count: _Optional[int] = ..., source: _Optional[str] = ...) -> None: ...

class SlotRuns(_message.Message):
    __slots__ = ("places", "generations", "counts")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    GENERATIONS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    places: bytes
    generations: bytes
    counts: bytes
    def __init__(self, places: _Optional[bytes] = ..., generations: _Optional[bytes] = ..., counts: _Optional[bytes] = ...) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("lease_id", "first_block", "block_count", "partial")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PARTIAL_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first_block: int
    block_count: int
    partial: bool
    def __init__(self, lease_id: _Optional[int] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., partial: _Optional[bool] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("first_block", "block_count", "slots", "failed_reason", "inline")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_FIELD_NUMBER: _ClassVar[int]
    FAILED_REASON_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    block_count: int
    slots: SlotRuns
    failed_reason: str
    inline: bool
    def __init__(self, first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., slots: _Optional[_Union[SlotRuns, _Mapping]] = ..., failed_reason: _Optional[str] = ..., inline: _Optional[bool] = ...) -> None: ...

class CancelRestoreRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class CancelRestoreResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("lost_leases", "lease_ttl_seconds")
    LOST_LEASES_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lost_leases: _containers.RepeatedScalarFieldContainer[int]
    lease_ttl_seconds: float
    def __init__(self, lost_leases: _Optional[_Iterable[int]] = ..., lease_ttl_seconds: _Optional[float] = ...) -> None: ...

class FinishRequestRequest(_message.Message):
    __slots__ = ("attachment", "request_id", "output_tokens", "reuse", "finish_reason", "pending_tool_calls")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PENDING_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    request_id: str
    output_tokens: int
    reuse: ReuseHints
    finish_reason: str
    pending_tool_calls: bool
    def __init__(self, attachment: _Optional[int] = ..., request_id: _Optional[str] = ..., output_tokens: _Optional[int] = ..., reuse: _Optional[_Union[ReuseHints, _Mapping]] = ..., finish_reason: _Optional[str] = ..., pending_tool_calls: _Optional[bool] = ...) -> None: ...

class FinishRequestResponse(_message.Message):
    __slots__ = ("released_leases",)
    RELEASED_LEASES_FIELD_NUMBER: _ClassVar[int]
    released_leases: int
    def __init__(self, released_leases: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("attachment", "request_id", "prompt", "first_block", "reuse")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    REUSE_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    request_id: str
    prompt: Prompt
    first_block: int
    reuse: ReuseHints
    def __init__(self, attachment: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., first_block: _Optional[int] = ..., reuse: _Optional[_Union[ReuseHints, _Mapping]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("reservation_id", "first_block", "outcomes", "staging_ttl_seconds", "reason")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    STAGING_TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    first_block: int
    outcomes: bytes
    staging_ttl_seconds: float
    reason: str
    def __init__(self, reservation_id: _Optional[int] = ..., first_block: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., staging_ttl_seconds: _Optional[float] = ..., reason: _Optional[str] = ...) -> None: ...

class CommitRun(_message.Message):
    __slots__ = ("first_block", "block_count", "staging_offset")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    block_count: int
    staging_offset: int
    def __init__(self, first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., staging_offset: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "runs")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    runs: _containers.RepeatedCompositeFieldContainer[CommitRun]
    def __init__(self, reservation_id: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[CommitRun, _Mapping]]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CommitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[CommitResult, _Mapping]]] = ...) -> None: ...

class CommitResult(_message.Message):
    __slots__ = ("first_block", "outcomes", "reason")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    outcomes: bytes
    reason: str
    def __init__(self, first_block: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    def __init__(self, reservation_id: _Optional[int] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PutInlineRequest(_message.Message):
    __slots__ = ("reserve", "block", "data")
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    reserve: ReserveRequest
    block: int
    data: bytes
    def __init__(self, reserve: _Optional[_Union[ReserveRequest, _Mapping]] = ..., block: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class PutInlineResponse(_message.Message):
    __slots__ = ("first_block", "outcomes", "reason")
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    first_block: int
    outcomes: bytes
    reason: str
    def __init__(self, first_block: _Optional[int] = ..., outcomes: _Optional[bytes] = ..., reason: _Optional[str] = ...) -> None: ...

class FetchInlineRequest(_message.Message):
    __slots__ = ("lease_id", "first_block", "block_count")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first_block: int
    block_count: int
    def __init__(self, lease_id: _Optional[int] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ...) -> None: ...

class FetchInlineResponse(_message.Message):
    __slots__ = ("block", "offset", "data", "checksum")
    BLOCK_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    block: int
    offset: int
    data: bytes
    checksum: bytes
    def __init__(self, block: _Optional[int] = ..., offset: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[bytes] = ...) -> None: ...

class ReportStepRequest(_message.Message):
    __slots__ = ("attachment", "seconds", "prefill", "decode_tokens", "decode_context_tokens", "clock")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    seconds: float
    prefill: _containers.RepeatedCompositeFieldContainer[PrefillPart]
    decode_tokens: int
    decode_context_tokens: int
    clock: str
    def __init__(self, attachment: _Optional[int] = ..., seconds: _Optional[float] = ..., prefill: _Optional[_Iterable[_Union[PrefillPart, _Mapping]]] = ..., decode_tokens: _Optional[int] = ..., decode_context_tokens: _Optional[int] = ..., clock: _Optional[str] = ...) -> None: ...

class PrefillPart(_message.Message):
    __slots__ = ("new_tokens", "cached_tokens", "request_id")
    NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    new_tokens: int
    cached_tokens: int
    request_id: str
    def __init__(self, new_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ReportStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportTransferRequest(_message.Message):
    __slots__ = ("attachment", "link", "bytes", "seconds", "lease_id")
    ATTACHMENT_FIELD_NUMBER: _ClassVar[int]
    LINK_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    attachment: int
    link: str
    bytes: int
    seconds: float
    lease_id: int
    def __init__(self, attachment: _Optional[int] = ..., link: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ..., lease_id: _Optional[int] = ...) -> None: ...

class ReportTransferResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachDeviceRequest(_message.Message):
    __slots__ = ("device_uuid", "staging_bytes")
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    device_uuid: str
    staging_bytes: int
    def __init__(self, device_uuid: _Optional[str] = ..., staging_bytes: _Optional[int] = ...) -> None: ...

class AttachDeviceResponse(_message.Message):
    __slots__ = ("share", "handle", "offset", "length")
    SHARE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    share: str
    handle: bytes
    offset: int
    length: int
    def __init__(self, share: _Optional[str] = ..., handle: _Optional[bytes] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class LoadDeviceRequest(_message.Message):
    __slots__ = ("lease_id", "first_block", "block_count", "staging_offset", "staging_bytes", "device_uuid")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSET_FIELD_NUMBER: _ClassVar[int]
    STAGING_BYTES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    first_block: int
    block_count: int
    staging_offset: int
    staging_bytes: int
    device_uuid: str
    def __init__(self, lease_id: _Optional[int] = ..., first_block: _Optional[int] = ..., block_count: _Optional[int] = ..., staging_offset: _Optional[int] = ..., staging_bytes: _Optional[int] = ..., device_uuid: _Optional[str] = ...) -> None: ...

class LoadDeviceResponse(_message.Message):
    __slots__ = ("offsets",)
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    offsets: bytes
    def __init__(self, offsets: _Optional[bytes] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("from_sequence",)
    FROM_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    from_sequence: int
    def __init__(self, from_sequence: _Optional[int] = ...) -> None: ...

class Event(_message.Message):
    __slots__ = ("sequence", "wall_seconds", "space_id", "stored", "removed", "cleared", "lost")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    WALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    STORED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    CLEARED_FIELD_NUMBER: _ClassVar[int]
    LOST_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    wall_seconds: float
    space_id: bytes
    stored: BlockStored
    removed: BlockRemoved
    cleared: AllBlocksCleared
    lost: EventsLost
    def __init__(self, sequence: _Optional[int] = ..., wall_seconds: _Optional[float] = ..., space_id: _Optional[bytes] = ..., stored: _Optional[_Union[BlockStored, _Mapping]] = ..., removed: _Optional[_Union[BlockRemoved, _Mapping]] = ..., cleared: _Optional[_Union[AllBlocksCleared, _Mapping]] = ..., lost: _Optional[_Union[EventsLost, _Mapping]] = ...) -> None: ...

class BlockStored(_message.Message):
    __slots__ = ("medium", "block_keys", "parent_key", "symbols", "block_size", "adapter")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    SYMBOLS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    medium: str
    block_keys: bytes
    parent_key: bytes
    symbols: bytes
    block_size: int
    adapter: str
    def __init__(self, medium: _Optional[str] = ..., block_keys: _Optional[bytes] = ..., parent_key: _Optional[bytes] = ..., symbols: _Optional[bytes] = ..., block_size: _Optional[int] = ..., adapter: _Optional[str] = ...) -> None: ...

class BlockRemoved(_message.Message):
    __slots__ = ("medium", "block_keys")
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEYS_FIELD_NUMBER: _ClassVar[int]
    medium: str
    block_keys: bytes
    def __init__(self, medium: _Optional[str] = ..., block_keys: _Optional[bytes] = ...) -> None: ...

class AllBlocksCleared(_message.Message):
    __slots__ = ("medium",)
    MEDIUM_FIELD_NUMBER: _ClassVar[int]
    medium: str
    def __init__(self, medium: _Optional[str] = ...) -> None: ...

class EventsLost(_message.Message):
    __slots__ = ("next_sequence",)
    NEXT_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    next_sequence: int
    def __init__(self, next_sequence: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ("with_spaces", "with_tenants")
    WITH_SPACES_FIELD_NUMBER: _ClassVar[int]
    WITH_TENANTS_FIELD_NUMBER: _ClassVar[int]
    with_spaces: bool
    with_tenants: bool
    def __init__(self, with_spaces: _Optional[bool] = ..., with_tenants: _Optional[bool] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("state", "reason", "tiers", "session_count", "lease_count", "space_count", "policy", "version", "pid", "uptime_seconds", "block_count", "readopted_blocks", "leased_bytes", "reservation_count", "spaces", "tenants", "counters", "pin_count", "costs", "configured_policy", "policy_reason", "shadows", "shadow_share", "shadow_request_count", "what_if")
    class TiersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TierStatus
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TierStatus, _Mapping]] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TIERS_FIELD_NUMBER: _ClassVar[int]
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPACE_COUNT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    READOPTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_COUNT_FIELD_NUMBER: _ClassVar[int]
    SPACES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    PIN_COUNT_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_POLICY_FIELD_NUMBER: _ClassVar[int]
    POLICY_REASON_FIELD_NUMBER: _ClassVar[int]
    SHADOWS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_SHARE_FIELD_NUMBER: _ClassVar[int]
    SHADOW_REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    WHAT_IF_FIELD_NUMBER: _ClassVar[int]
    state: str
    reason: str
    tiers: _containers.MessageMap[str, TierStatus]
    session_count: int
    lease_count: int
    space_count: int
    policy: str
    version: str
    pid: int
    uptime_seconds: float
    block_count: int
    readopted_blocks: int
    leased_bytes: int
    reservation_count: int
    spaces: _containers.RepeatedCompositeFieldContainer[SpaceStatus]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantStatus]
    counters: _containers.ScalarMap[str, float]
    pin_count: int
    costs: _containers.RepeatedCompositeFieldContainer[CostStatus]
    configured_policy: str
    policy_reason: str
    shadows: _containers.RepeatedCompositeFieldContainer[ShadowStatus]
    shadow_share: float
    shadow_request_count: int
    what_if: str
    def __init__(self, state: _Optional[str] = ..., reason: _Optional[str] = ..., tiers: _Optional[_Mapping[str, TierStatus]] = ..., session_count: _Optional[int] = ..., lease_count: _Optional[int] = ..., space_count: _Optional[int] = ..., policy: _Optional[str] = ..., version: _Optional[str] = ..., pid: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., block_count: _Optional[int] = ..., readopted_blocks: _Optional[int] = ..., leased_bytes: _Optional[int] = ..., reservation_count: _Optional[int] = ..., spaces: _Optional[_Iterable[_Union[SpaceStatus, _Mapping]]] = ..., tenants: _Optional[_Iterable[_Union[TenantStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, float]] = ..., pin_count: _Optional[int] = ..., costs: _Optional[_Iterable[_Union[CostStatus, _Mapping]]] = ..., configured_policy: _Optional[str] = ..., policy_reason: _Optional[str] = ..., shadows: _Optional[_Iterable[_Union[ShadowStatus, _Mapping]]] = ..., shadow_share: _Optional[float] = ..., shadow_request_count: _Optional[int] = ..., what_if: _Optional[str] = ...) -> None: ...

class ShadowStatus(_message.Message):
    __slots__ = ("policy", "tier", "capacity_ratio", "token_hit_ratio", "saved_ratio", "saved_seconds_per_second", "hbm_token_hit_ratio")
    POLICY_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_RATIO_FIELD_NUMBER: _ClassVar[int]
    TOKEN_HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    SAVED_RATIO_FIELD_NUMBER: _ClassVar[int]
    SAVED_SECONDS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    HBM_TOKEN_HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    policy: str
    tier: str
    capacity_ratio: float
    token_hit_ratio: float
    saved_ratio: float
    saved_seconds_per_second: float
    hbm_token_hit_ratio: float
    def __init__(self, policy: _Optional[str] = ..., tier: _Optional[str] = ..., capacity_ratio: _Optional[float] = ..., token_hit_ratio: _Optional[float] = ..., saved_ratio: _Optional[float] = ..., saved_seconds_per_second: _Optional[float] = ..., hbm_token_hit_ratio: _Optional[float] = ...) -> None: ...

class CostStatus(_message.Message):
    __slots__ = ("subject", "device", "state", "reason", "sample_count", "predicted_seconds", "unit", "ratio_p50", "ratio_p99")
    SUBJECT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    RATIO_P50_FIELD_NUMBER: _ClassVar[int]
    RATIO_P99_FIELD_NUMBER: _ClassVar[int]
    subject: str
    device: str
    state: str
    reason: str
    sample_count: int
    predicted_seconds: float
    unit: str
    ratio_p50: float
    ratio_p99: float
    def __init__(self, subject: _Optional[str] = ..., device: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., sample_count: _Optional[int] = ..., predicted_seconds: _Optional[float] = ..., unit: _Optional[str] = ..., ratio_p50: _Optional[float] = ..., ratio_p99: _Optional[float] = ...) -> None: ...

class TierStatus(_message.Message):
    __slots__ = ("capacity_bytes", "used_bytes", "block_count", "state", "free_bytes", "resting_bytes", "prefaulted_bytes", "locked_bytes", "problem", "devices")
    class DevicesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: TierStatus
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[TierStatus, _Mapping]] = ...) -> None: ...
    CAPACITY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTING_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFAULTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOCKED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    capacity_bytes: int
    used_bytes: int
    block_count: int
    state: str
    free_bytes: int
    resting_bytes: int
    prefaulted_bytes: int
    locked_bytes: int
    problem: str
    devices: _containers.MessageMap[str, TierStatus]
    def __init__(self, capacity_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., block_count: _Optional[int] = ..., state: _Optional[str] = ..., free_bytes: _Optional[int] = ..., resting_bytes: _Optional[int] = ..., prefaulted_bytes: _Optional[int] = ..., locked_bytes: _Optional[int] = ..., problem: _Optional[str] = ..., devices: _Optional[_Mapping[str, TierStatus]] = ...) -> None: ...

class SpaceStatus(_message.Message):
    __slots__ = ("space_id", "spec", "tenant", "epoch", "block_count", "used_bytes", "attachment_count")
    class UsedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    ATTACHMENT_COUNT_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    spec: KVSpec
    tenant: str
    epoch: int
    block_count: int
    used_bytes: _containers.ScalarMap[str, int]
    attachment_count: int
    def __init__(self, space_id: _Optional[bytes] = ..., spec: _Optional[_Union[KVSpec, _Mapping]] = ..., tenant: _Optional[str] = ..., epoch: _Optional[int] = ..., block_count: _Optional[int] = ..., used_bytes: _Optional[_Mapping[str, int]] = ..., attachment_count: _Optional[int] = ...) -> None: ...

class TenantStatus(_message.Message):
    __slots__ = ("tenant", "isolated", "used_bytes", "cap_bytes", "floor_bytes")
    class UsedBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class CapBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class FloorBytesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ISOLATED_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    isolated: bool
    used_bytes: _containers.ScalarMap[str, int]
    cap_bytes: _containers.ScalarMap[str, int]
    floor_bytes: _containers.ScalarMap[str, int]
    def __init__(self, tenant: _Optional[str] = ..., isolated: _Optional[bool] = ..., used_bytes: _Optional[_Mapping[str, int]] = ..., cap_bytes: _Optional[_Mapping[str, int]] = ..., floor_bytes: _Optional[_Mapping[str, int]] = ...) -> None: ...

class SetPolicyRequest(_message.Message):
    __slots__ = ("eviction",)
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    eviction: str
    def __init__(self, eviction: _Optional[str] = ...) -> None: ...

class SetPolicyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "tier", "cap_bytes", "floor_bytes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    CAP_BYTES_FIELD_NUMBER: _ClassVar[int]
    FLOOR_BYTES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    tier: str
    cap_bytes: int
    floor_bytes: int
    def __init__(self, tenant: _Optional[str] = ..., tier: _Optional[str] = ..., cap_bytes: _Optional[int] = ..., floor_bytes: _Optional[int] = ...) -> None: ...

class SetQuotaResponse(_message.Message):
    __slots__ = ("tenant",)
    TENANT_FIELD_NUMBER: _ClassVar[int]
    tenant: TenantStatus
    def __init__(self, tenant: _Optional[_Union[TenantStatus, _Mapping]] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("request_id", "block_key", "ttl_seconds")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    block_key: bytes
    ttl_seconds: float
    def __init__(self, request_id: _Optional[str] = ..., block_key: _Optional[bytes] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class PinResponse(_message.Message):
    __slots__ = ("pin_id", "block_count", "pinned_bytes")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_COUNT_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    block_count: int
    pinned_bytes: int
    def __init__(self, pin_id: _Optional[str] = ..., block_count: _Optional[int] = ..., pinned_bytes: _Optional[int] = ...) -> None: ...

class UnpinRequest(_message.Message):
    __slots__ = ("pin_id", "request_id", "block_key")
    PIN_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    pin_id: str
    request_id: str
    block_key: bytes
    def __init__(self, pin_id: _Optional[str] = ..., request_id: _Optional[str] = ..., block_key: _Optional[bytes] = ...) -> None: ...

class UnpinResponse(_message.Message):
    __slots__ = ("released_pins",)
    RELEASED_PINS_FIELD_NUMBER: _ClassVar[int]
    released_pins: int
    def __init__(self, released_pins: _Optional[int] = ...) -> None: ...

class ClearRequest(_message.Message):
    __slots__ = ("space_id", "tenant", "all")
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ALL_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    tenant: str
    all: bool
    def __init__(self, space_id: _Optional[bytes] = ..., tenant: _Optional[str] = ..., all: _Optional[bool] = ...) -> None: ...

class ClearResponse(_message.Message):
    __slots__ = ("removed_blocks",)
    REMOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    removed_blocks: int
    def __init__(self, removed_blocks: _Optional[int] = ...) -> None: ...

class BumpEpochRequest(_message.Message):
    __slots__ = ("space_id",)
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    def __init__(self, space_id: _Optional[bytes] = ...) -> None: ...

class BumpEpochResponse(_message.Message):
    __slots__ = ("epoch", "removed_blocks")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REMOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    removed_blocks: int
    def __init__(self, epoch: _Optional[int] = ..., removed_blocks: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id", "block_key")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    BLOCK_KEY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    block_key: bytes
    def __init__(self, request_id: _Optional[str] = ..., block_key: _Optional[bytes] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("text", "document")
    TEXT_FIELD_NUMBER: _ClassVar[int]
    DOCUMENT_FIELD_NUMBER: _ClassVar[int]
    text: str
    document: bytes
    def __init__(self, text: _Optional[str] = ..., document: _Optional[bytes] = ...) -> None: ...

class FlushRequest(_message.Message):
    __slots__ = ("space_id",)
    SPACE_ID_FIELD_NUMBER: _ClassVar[int]
    space_id: bytes
    def __init__(self, space_id: _Optional[bytes] = ...) -> None: ...

class FlushResponse(_message.Message):
    __slots__ = ("durable_blocks", "left_out_blocks")
    DURABLE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    durable_blocks: int
    left_out_blocks: int
    def __init__(self, durable_blocks: _Optional[int] = ..., left_out_blocks: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("deadline_seconds", "free")
    DEADLINE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FREE_FIELD_NUMBER: _ClassVar[int]
    deadline_seconds: float
    free: bool
    def __init__(self, deadline_seconds: _Optional[float] = ..., free: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyRequest(_message.Message):
    __slots__ = ("tier",)
    TIER_FIELD_NUMBER: _ClassVar[int]
    tier: str
    def __init__(self, tier: _Optional[str] = ...) -> None: ...

class VerifyResponse(_message.Message):
    __slots__ = ("verified_blocks", "corrupt_blocks", "verified_bytes", "findings")
    VERIFIED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    verified_blocks: int
    corrupt_blocks: int
    verified_bytes: int
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, verified_blocks: _Optional[int] = ..., corrupt_blocks: _Optional[int] = ..., verified_bytes: _Optional[int] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class TraceStartRequest(_message.Message):
    __slots__ = ("block_size", "seconds", "requests")
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    block_size: int
    seconds: float
    requests: int
    def __init__(self, block_size: _Optional[int] = ..., seconds: _Optional[float] = ..., requests: _Optional[int] = ...) -> None: ...

class TraceStartResponse(_message.Message):
    __slots__ = ("records", "block_size", "request_count", "held_count", "left_out_count", "ended")
    RECORDS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    HELD_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEFT_OUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    records: _containers.RepeatedCompositeFieldContainer[TraceRecord]
    block_size: int
    request_count: int
    held_count: int
    left_out_count: int
    ended: str
    def __init__(self, records: _Optional[_Iterable[_Union[TraceRecord, _Mapping]]] = ..., block_size: _Optional[int] = ..., request_count: _Optional[int] = ..., held_count: _Optional[int] = ..., left_out_count: _Optional[int] = ..., ended: _Optional[str] = ...) -> None: ...

class TraceRecord(_message.Message):
    __slots__ = ("seconds", "input_tokens", "output_tokens", "blocks", "tenant", "session")
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    INPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    seconds: float
    input_tokens: int
    output_tokens: int
    blocks: bytes
    tenant: str
    session: int
    def __init__(self, seconds: _Optional[float] = ..., input_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., blocks: _Optional[bytes] = ..., tenant: _Optional[str] = ..., session: _Optional[int] = ...) -> None: ...

class TraceStopRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class TraceStopResponse(_message.Message):
    __slots__ = ("request_count",)
    REQUEST_COUNT_FIELD_NUMBER: _ClassVar[int]
    request_count: int
    def __init__(self, request_count: _Optional[int] = ...) -> None: ...
