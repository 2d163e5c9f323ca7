// SPDX-License-Identifier: MIT OR GPL-2.0-only

// Programs that list connected UDP sockets with the endpoints that sockets.c has given them, and end some
// of them. The file is compiled for each IP family.

#include <linux/bpf.h>
#include <linux/types.h>

#include <bpf/bpf_helpers.h>

#include "peer.h"

/* The parts of the kernel's structures that the programs read; their places are found when they are
 * loaded. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct in6_addr {
	union {
		__be32 u6_addr32[4];
	} in6_u;
};

struct ns_common {
	unsigned int inum;
};

struct net {
	struct ns_common ns;
};

typedef struct {
	struct net *net;
} possible_net_t;

struct sock_common {
	__be32 skc_daddr;
	__be16 skc_dport;
	possible_net_t skc_net;
	struct in6_addr skc_v6_daddr;
};

struct sock {
	struct sock_common __sk_common;
};

struct inet_sock {
	struct sock sk;
};

struct udp_sock {
	struct inet_sock inet;
};

struct seq_file;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	struct sock *sk;
	void *value;
};

struct bpf_iter__udp {
	struct bpf_iter_meta *meta;
	struct udp_sock *udp_sk;
};

#pragma clang attribute pop

extern int bpf_sock_destroy(struct sock_common *sock) __ksym;

/* A connected socket. */
struct found {
	__u64 cookie;
	__u32 netns;
	__be16 vip_port;
	__be16 endpoint_port;
	__be32 vip[WORDS];
	__be32 endpoint[WORDS];
};

struct stale {
	__be32 endpoint[WORDS];
	__be16 endpoint_port;
	__u16 ended; /* written by destroy */
};

/* Which sockets to end, by cookie. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 16384);
	__type(key, __u64);
	__type(value, struct stale);
} stale SEC(".maps");

/* is_connected is whether a socket is still connected to an endpoint. */
static __always_inline int is_connected(struct sock *sk, const __be32 *endpoint, __be16 port)
{
	if (sk->__sk_common.skc_dport != port)
		return 0;
#ifdef IPV6
	return sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[0] == endpoint[0] &&
	       sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[1] == endpoint[1] &&
	       sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[2] == endpoint[2] &&
	       sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[3] == endpoint[3];
#else
	return sk->__sk_common.skc_daddr == endpoint[0];
#endif
}

SEC("iter/bpf_sk_storage_map")
int find(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct datagrams *d = ctx->value;
	struct sock *sk = ctx->sk;
	struct found found = {};

	if (!sk || !d || !d->connected.vip_port)
		return 0;
#pragma unroll
	for (int w = 0; w < WORDS; w++) {
		found.vip[w] = d->connected.vip[w];
		found.endpoint[w] = d->connected.endpoint[w];
	}
	found.vip_port = d->connected.vip_port;
	found.endpoint_port = d->connected.endpoint_port;
	if (!is_connected(sk, found.endpoint, found.endpoint_port))
		return 0;
	found.cookie = bpf_get_socket_cookie(sk);
	found.netns = sk->__sk_common.skc_net.net->ns.inum;
	bpf_seq_write(ctx->meta->seq, &found, sizeof(found));
	return 0;
}

/* destroy ends the stale sockets of a network namespace, with bpf_sock_destroy of Linux 6.5. */
SEC("iter/udp")
int destroy(struct bpf_iter__udp *ctx)
{
	struct sock *sk = (struct sock *)ctx->udp_sk;
	struct stale *is;
	__u64 cookie;

	if (!sk)
		return 0;
	cookie = bpf_get_socket_cookie(sk);
	is = bpf_map_lookup_elem(&stale, &cookie);
	if (!is || !is_connected(sk, is->endpoint, is->endpoint_port))
		return 0;
	if (!bpf_sock_destroy((struct sock_common *)sk))
		is->ended = 1;
	return 0;
}

char licenses[] SEC("license") = "Dual MIT/GPL";
