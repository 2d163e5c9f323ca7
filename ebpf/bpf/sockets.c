// SPDX-License-Identifier: MIT OR GPL-2.0-only

// Programs that translate the destination of a socket once, when it connects. The file is compiled
// for each IP family, see generate.go.
//
// A program never refuses anything: it translates, or leaves the address as it is. Then the rules
// of the node decide.

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#ifdef IPV6
#define WORDS 4 /* of an address */
#else
#define WORDS 1
#endif

#define SOCK_STREAM 1

struct frontend_key {
	__be32 addr[WORDS];
	__be16 port;
	__u8 protocol;
	__u8 pad;
};

struct frontend {
	__u32 service; /* index */
	__u32 scope;   /* index in picks */
};

/* A pick names the endpoints of a scope: the index of the first (32 bits), their number (16 bits)
 * and a number that differs from one publication to the next (16 bits). It is written and read as
 * one word, so that no program sees half of a change. */
struct service {
	__u64 picks[2];
};

struct endpoint {
	__be32 addr[WORDS];
	__be16 port;
	__u16 pad;
#ifdef IPV6
	__u32 pad2;
#endif
};

/* What a socket was connected to, and where that led. */
struct peer {
	__be32 vip[WORDS];
	__be32 endpoint[WORDS];
	__be16 vip_port;
	__be16 endpoint_port;
	__u32 service;
	__u64 pick;
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 1); /* as are those below: chosen when it is loaded */
	__type(key, struct frontend_key);
	__type(value, struct frontend);
} frontends SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct service);
} services SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, 1);
	__type(key, __u32);
	__type(value, struct endpoint);
} endpoints SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct peer);
} peers SEC(".maps");

/* Network namespaces, by cookie, whose sockets are treated differently. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(max_entries, 65536);
	__type(key, __u64);
	__type(value, __u32);
} namespaces SEC(".maps");

enum {
	TRANSLATED,
	SKIPPED,   /* the network namespace is left to the rules */
	BOUND,	   /* a socket of the node that is bound to an address */
	EMPTY,	   /* no endpoint, for a moment */
	NO_MEMORY, /* the VIP cannot be remembered */
	COUNTS,
};

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNTS);
	__type(key, __u32);
	__type(value, __u64);
} counts SEC(".maps");

/* Set when the programs are loaded. */
volatile const __u64 node_cookie;   /* the network namespace of the node */
volatile const __u8 only_listed;    /* translate in the listed namespaces only, instead of in all others */
volatile const __u8 use_namespaces; /* the list is not empty, or may become so */
volatile const __u8 real_peer;	    /* getpeername shows the endpoint */

static __always_inline void count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&counts, &what);

	if (n)
		__sync_fetch_and_add(n, 1); /* another program may interrupt this one */
}

/* skips is whether the socket is left to the rules because of where it is. */
static __always_inline int skips(struct bpf_sock_addr *ctx, int bound)
{
	__u64 cookie = bpf_get_netns_cookie(ctx);

	if (use_namespaces) {
		int listed = bpf_map_lookup_elem(&namespaces, &cookie) != NULL;

		if (listed != only_listed) {
			count(SKIPPED);
			return 1;
		}
	}
	/* Rules masquerade the node's own connections. An unbound socket gets the same address by
	 * routing, a bound one would keep its own. */
	if (cookie == node_cookie && bound) {
		count(BOUND);
		return 1;
	}
	return 0;
}

/* choose looks up the address that a socket connects to, and chooses an endpoint. NULL means to
 * leave it to the rules. */
static __always_inline struct endpoint *choose(struct bpf_sock_addr *ctx, struct frontend_key *key, int bound)
{
	struct frontend *frontend = bpf_map_lookup_elem(&frontends, key);
	struct service *service;
	struct endpoint *endpoint;
	__u32 service_index, n, i;
	__u64 pick;

	if (!frontend)
		return NULL; /* most sockets */
	if (skips(ctx, bound))
		return NULL;
	service_index = frontend->service;
	service = bpf_map_lookup_elem(&services, &service_index);
	if (!service)
		return NULL;
	pick = *(volatile __u64 *)&service->picks[frontend->scope & 1];
	n = (pick >> 16) & 0xffff;
	if (!n) {
		count(EMPTY);
		return NULL;
	}
	i = (__u32)(pick >> 32) + bpf_get_prandom_u32() % n;
	endpoint = bpf_map_lookup_elem(&endpoints, &i);
	if (!endpoint)
		return NULL;
	if (!real_peer) {
		struct peer *peer = bpf_sk_storage_get(&peers, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);

		if (!peer) {
			count(NO_MEMORY);
			return NULL;
		}
#pragma unroll
		for (int w = 0; w < WORDS; w++) {
			peer->vip[w] = key->addr[w];
			peer->endpoint[w] = endpoint->addr[w];
		}
		peer->vip_port = key->port;
		peer->endpoint_port = endpoint->port;
		peer->service = service_index;
		peer->pick = pick;
	}
	count(TRANSLATED);
	return endpoint;
}

/* translates is whether the protocol is one whose sockets are translated. Others, such as MPTCP
 * (262), do not fit a byte. */
static __always_inline int translates(struct bpf_sock_addr *ctx)
{
	return ctx->protocol == IPPROTO_TCP && ctx->type == SOCK_STREAM;
}

/* vip_of returns what a socket was connected to, if the address is the endpoint's. */
static __always_inline struct peer *vip_of(struct bpf_sock_addr *ctx, const __be32 *addr, __be16 port)
{
	struct peer *peer = bpf_sk_storage_get(&peers, ctx->sk, NULL, 0);

	if (!peer || peer->endpoint_port != port)
		return NULL;
#pragma unroll
	for (int w = 0; w < WORDS; w++)
		if (peer->endpoint[w] != addr[w])
			return NULL;
	return peer;
}

#ifdef IPV6

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct frontend_key key = {.port = ctx->user_port, .protocol = IPPROTO_TCP};
	struct endpoint *to;
	int bound;

	if (!translates(ctx))
		return 1;
	key.addr[0] = ctx->user_ip6[0];
	key.addr[1] = ctx->user_ip6[1];
	key.addr[2] = ctx->user_ip6[2];
	key.addr[3] = ctx->user_ip6[3];
	bound = (ctx->sk->src_ip6[0] | ctx->sk->src_ip6[1] | ctx->sk->src_ip6[2] | ctx->sk->src_ip6[3]) != 0;
	to = choose(ctx, &key, bound);
	if (!to)
		return 1;
	ctx->user_ip6[0] = to->addr[0];
	ctx->user_ip6[1] = to->addr[1];
	ctx->user_ip6[2] = to->addr[2];
	ctx->user_ip6[3] = to->addr[3];
	ctx->user_port = to->port;
	return 1;
}

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	__be32 addr[4] = {ctx->user_ip6[0], ctx->user_ip6[1], ctx->user_ip6[2], ctx->user_ip6[3]};
	struct peer *peer = vip_of(ctx, addr, ctx->user_port);

	if (peer) {
		ctx->user_ip6[0] = peer->vip[0];
		ctx->user_ip6[1] = peer->vip[1];
		ctx->user_ip6[2] = peer->vip[2];
		ctx->user_ip6[3] = peer->vip[3];
		ctx->user_port = peer->vip_port;
	}
	return 1;
}

#else

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct frontend_key key = {.addr = {ctx->user_ip4}, .port = ctx->user_port, .protocol = IPPROTO_TCP};
	struct endpoint *to;

	if (!translates(ctx))
		return 1;
	to = choose(ctx, &key, ctx->sk->src_ip4 != 0);
	if (!to)
		return 1;
	ctx->user_ip4 = to->addr[0];
	ctx->user_port = to->port;
	return 1;
}

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	__be32 addr = ctx->user_ip4;
	struct peer *peer = vip_of(ctx, &addr, ctx->user_port);

	if (peer) {
		ctx->user_ip4 = peer->vip[0];
		ctx->user_port = peer->vip_port;
	}
	return 1;
}

/* mapped is whether an IPv6 socket connects to an IPv4 address, ::ffff:192.0.2.1. */
static __always_inline int mapped(struct bpf_sock_addr *ctx)
{
	return !ctx->user_ip6[0] && !ctx->user_ip6[1] && ctx->user_ip6[2] == bpf_htonl(0xffff);
}

SEC("cgroup/connect6")
int connect_mapped(struct bpf_sock_addr *ctx)
{
	struct frontend_key key = {.port = ctx->user_port, .protocol = IPPROTO_TCP};
	struct endpoint *to;

	if (!translates(ctx) || !mapped(ctx))
		return 1;
	key.addr[0] = ctx->user_ip6[3];
	/* A socket that is bound to ::ffff:192.0.2.1 has that IPv4 address too. */
	to = choose(ctx, &key, ctx->sk->src_ip4 != 0);
	if (!to)
		return 1;
	ctx->user_ip6[3] = to->addr[0];
	ctx->user_port = to->port;
	return 1;
}

SEC("cgroup/getpeername6")
int getpeername_mapped(struct bpf_sock_addr *ctx)
{
	struct peer *peer;
	__be32 addr;

	if (!mapped(ctx))
		return 1;
	addr = ctx->user_ip6[3];
	peer = vip_of(ctx, &addr, ctx->user_port);
	if (peer) {
		ctx->user_ip6[3] = peer->vip[0];
		ctx->user_port = peer->vip_port;
	}
	return 1;
}

#endif

char licenses[] SEC("license") = "Dual MIT/GPL";
