"""The store over etcd.

access     endpoints, certificates, user and password     refusals   what went wrong, in sentences
wire       pure: what is said to etcd                      gateway    calls and streams, through outages
session    a lease, and writes that happen once            mirror     pure: what a watch has told
blob       pure: large values in parts                     store      EtcdStore
"""

from culm.cluster.etcd.access import Access, parse_access
from culm.cluster.etcd.store import EtcdStore

__all__ = ["Access", "EtcdStore", "parse_access"]
