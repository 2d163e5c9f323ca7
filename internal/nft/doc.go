// Package nft writes and reads nf_tables over netlink (linux/netfilter/nf_tables.h), for all packages that
// have rules there. It encodes messages into one buffer, and expressions with github.com/google/nftables/expr.
package nft
