"""Errors of the SDK translated: the one place that decides between failed and unknown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dstl.errors import (
    AccessDenied,
    DstlError,
    Invalid,
    ObjectExists,
    ObjectNotFound,
    OutcomeUnknown,
    SlowDown,
    Unavailable,
)

_EXPIRED = frozenset({"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"})
_CREDENTIALS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "UnrecognizedClientException"})
_SLOW = frozenset(
    {
        "SlowDown",
        "ServiceUnavailable",
        "Throttling",
        "ThrottlingException",
        "TooManyRequests",
        "TooManyRequestsException",
        "RequestLimitExceeded",
        "BandwidthLimitExceeded",
    }
)
"""S3's own words for a request that it has not begun. Others resemble them: MinIO's SlowDownWrite comes of a write that
some of its disks have carried out."""
_DAMAGED = frozenset({"BadDigest", "IncompleteBody", "RequestTimeout", "XAmzContentChecksumMismatch", "InvalidDigest"})
_ELSEWHERE = frozenset({"PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed", "301", "307"})


def sdk_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions that a request to S3 ends with; to be called where the SDK is loaded already."""
    from aiohttp import ClientError as HttpClientError
    from botocore.exceptions import BotoCoreError, ClientError

    return (BotoCoreError, ClientError, HttpClientError, OSError, TimeoutError)


def error_code(error: BaseException) -> tuple[str, int]:
    """Return S3's error code and the HTTP status; ``("", 0)`` where no answer came."""
    response: Any = getattr(error, "response", None)
    if not isinstance(response, dict):
        return "", 0
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    return str(response.get("Error", {}).get("Code", "")), int(status)


def is_expired(error: BaseException) -> bool:
    """Return whether the credentials were refused for their age, so that fresh ones may do."""
    return error_code(error)[0] in _EXPIRED


@contextmanager
def translating(what: str, *, writes: bool = False) -> Iterator[None]:
    """Turn the errors of the requests within into ours, as :func:`_translated` does."""
    try:
        yield
    except DstlError:
        # First, and not only for speed: without the extra there is no SDK to ask for its errors.
        raise
    except sdk_errors() as error:
        raise _translate(error, what, writes=writes) from error


def _translate(error: Exception, what: str, *, writes: bool) -> DstlError:
    """Return the error of our tree.

    Args:
        error: One of :func:`sdk_errors`.
        what: Operation and object, as ``PutObject s3://bucket/name``: begins the message.
        writes: The request, if it arrived, may have made an object. A lost answer is then ``OutcomeUnknown``;
            otherwise ``Unavailable``.
    """
    code, status = error_code(error)
    if not status:
        return _without_answer(error, what, writes)
    reason = f"{what}: {code or 'error'} ({status})"
    if code in _EXPIRED or code in _CREDENTIALS or code == "RequestTimeTooSkewed":
        hint = "check the clock" if code == "RequestTimeTooSkewed" else "renew the credentials"
        return AccessDenied(f"{reason}; {hint} of this process")
    if status == 412:
        return ObjectExists(f"{reason}; the name is taken")
    if status == 409 and code in ("ConditionalRequestConflict", "OperationAborted"):
        # S3 did not carry out *this* request: another write or delete of the name was under way. The next attempt
        # finds either a free name or a 412. So it is certain, and not unknown.
        return Unavailable(f"{reason}; another write of the same name was under way, nothing was stored by this one")
    if code in _SLOW or (status in (429, 503) and not writes):
        return SlowDown(f"{reason}; nothing was done, send less")
    if code == "NoSuchBucket":
        return Invalid(f"{reason}; make the bucket or correct the location")
    if code in _ELSEWHERE or status in (301, 307):
        return Invalid(f"{reason}; the bucket is in another region: set the region option to the bucket's")
    if status == 404 and code != "NoSuchUpload":
        return ObjectNotFound(f"{reason}; no such object")
    if code.startswith("KMS."):
        return Invalid(f"{reason}; the KMS key cannot be used: check sse_kms_key_id and the key's state")
    if status in (401, 403):
        return AccessDenied(f"{reason}; grant this operation to the role, and check expected_bucket_owner")
    if code in _DAMAGED or code == "NoSuchUpload":
        return Unavailable(f"{reason}; it did not arrive whole, nothing was stored")
    if status >= 500 or status == 429:
        # A 503 without S3's document is a gateway's, which also says so of a PUT that the server behind it has carried
        # out before it broke the connection.
        return _loss(reason, writes)
    return Invalid(f"{reason}: {_shorten(error)}")


def _without_answer(error: Exception, what: str, writes: bool) -> DstlError:
    from aiohttp import ClientConnectorError
    from botocore.exceptions import (
        ConfigNotFound,
        ConfigParseError,
        ConnectTimeoutError,
        EndpointConnectionError,
        InvalidConfigError,
        NoCredentialsError,
        ParamValidationError,
        PartialCredentialsError,
        ProfileNotFound,
        ProxyConnectionError,
        SSLError,
    )

    reason = f"{what}: {_shorten(error)}"
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return AccessDenied(f"{what}: no AWS credentials found; give them to the SDK (environment, profile or role)")
    if isinstance(error, ConnectTimeoutError | ProxyConnectionError | SSLError):
        return Unavailable(f"{reason}; nothing was sent")
    if isinstance(error, EndpointConnectionError) and isinstance(error.kwargs.get("error"), ClientConnectorError):
        # aiobotocore gives the same name to a reset in the middle of a request: only this cause is certain.
        return Unavailable(f"{reason}; nothing was sent")
    if isinstance(error, ProfileNotFound | ConfigNotFound | ConfigParseError | InvalidConfigError):
        return Invalid(f"{reason}; correct AWS_PROFILE, or the SDK's files of this host")
    if isinstance(error, ParamValidationError):
        return Invalid(reason)
    return _loss(reason, writes)


def _loss(reason: str, writes: bool) -> DstlError:
    if writes:
        return OutcomeUnknown(f"{reason}; the object may or may not be stored")
    return Unavailable(reason)


def _shorten(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]
