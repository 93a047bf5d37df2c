"""The store over etcd.

etcd_access     endpoints, certificates, user, password    etcd_errors    errors as sentences
etcd_messages   pure: requests and answers                 etcd_gateway   calls and streams, retried through outages
lease_session   a lease, and writes that happen once       watch_state    pure: what a watch has delivered
large_values    pure: large values in parts                etcd_store     EtcdStore
"""

from culm.cluster.store.etcd.etcd_access import EtcdAccess, parse_etcd_access
from culm.cluster.store.etcd.etcd_store import EtcdStore

__all__ = ["EtcdAccess", "EtcdStore", "parse_etcd_access"]
