// SPDX-License-Identifier: MIT OR GPL-2.0-only

// Programs that translate the destination of a socket once, when it connects, or that of datagrams when
// they are sent. The file is compiled for each IP family, see hack/ebpf.sh.
//
// A program never refuses anything: it translates, or leaves the address as it is. Then the rules
// of the node decide.

#include <linux/bpf.h>
#include <linux/in.h>
#include <linux/types.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "peer.h"

#define SOCK_STREAM 1
#define SOCK_DGRAM 2

struct frontend_key {
	__be32 addr[WORDS];
	__be16 port;
	__u8 protocol;
	__u8 pad;
};

struct frontend {
	__u32 service; /* index */
	__u32 scope;   /* index in ranges */
};

/* A range names the endpoints of a scope: the index of the first (32 bits), their number (16 bits)
 * and a number that differs from one publication to the next (16 bits). It is written and read as
 * one word, so that no program sees half of a change. */
struct service {
	__u64 ranges[2];
};

struct endpoint {
	__be32 addr[WORDS];
	__be16 port;
	__u16 pad;
#ifdef IPV6
	__u32 pad2;
#endif
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
} peers SEC(".maps"); /* of TCP */

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct datagrams);
} datagrams SEC(".maps");

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
volatile const __u8 translate_udp;  /* and not TCP alone */

static __always_inline void count(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&counts, &what);

	if (n)
		__sync_fetch_and_add(n, 1); /* another program may interrupt this one */
}

/* skips is whether the socket is left to the rules because of where it is. bpf_get_netns_cookie is there since
 * Linux 5.7. */
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

/* A target is what a frontend leads to. */
struct target {
	__u32 service;
	__u64 range;
};

static __always_inline __u32 first_of(__u64 range) { return range >> 32; }

static __always_inline __u32 count_of(__u64 range) { return (range >> 16) & 0xffff; }

/* look_up finds the target of an address. 0 means to leave it to the rules. */
static __always_inline int look_up(struct bpf_sock_addr *ctx, struct frontend_key *key, int bound, struct target *to)
{
	struct frontend *frontend = bpf_map_lookup_elem(&frontends, key);
	struct service *service;

	if (!frontend)
		return 0; /* most sockets */
	if (skips(ctx, bound))
		return 0;
	to->service = frontend->service;
	service = bpf_map_lookup_elem(&services, &to->service);
	if (!service)
		return 0;
	/* One read: the process may store another range at any time. The mask shows the verifier that the index is
	 * one of two; a map's value may be anything. */
	to->range = *(volatile __u64 *)&service->ranges[frontend->scope & 1];
	if (!count_of(to->range)) {
		count(EMPTY);
		return 0;
	}
	return 1;
}

/* random_endpoint is one of a range. The process gives the places to other endpoints only when no program can have
 * the old range: see layer.go. */
static __always_inline struct endpoint *random_endpoint(__u64 range)
{
	__u32 i = first_of(range) + bpf_get_prandom_u32() % count_of(range);

	return bpf_map_lookup_elem(&endpoints, &i);
}

static __always_inline int equal(const __be32 *a, const __be32 *b)
{
#pragma unroll
	for (int w = 0; w < WORDS; w++)
		if (a[w] != b[w])
			return 0;
	return 1;
}

static __always_inline void remember(struct peer *peer, struct frontend_key *key, struct endpoint *endpoint, struct target *to)
{
#pragma unroll
	for (int w = 0; w < WORDS; w++) {
		peer->vip[w] = key->addr[w];
		peer->endpoint[w] = endpoint->addr[w];
	}
	peer->vip_port = key->port;
	peer->endpoint_port = endpoint->port;
	peer->service = to->service;
	peer->range = to->range;
}

/* connected_of returns what a TCP or UDP socket remembers of its connection. */
static __always_inline struct peer *connected_of(struct bpf_sock_addr *ctx, __u64 flags)
{
	struct datagrams *d;

	if (ctx->protocol != IPPROTO_UDP)
		return bpf_sk_storage_get(&peers, ctx->sk, NULL, flags);
	d = bpf_sk_storage_get(&datagrams, ctx->sk, NULL, flags);
	return d ? &d->connected : NULL;
}

/* forget is for a socket that was connected to a VIP, or has tried to be, and connects to something else. */
static __always_inline struct endpoint *forget(struct bpf_sock_addr *ctx, __u8 protocol)
{
	struct peer *peer = protocol == IPPROTO_UDP || !real_peer ? connected_of(ctx, 0) : NULL;

	if (peer)
		peer->vip_port = 0;
	return NULL;
}

/* choose looks up the address that a socket connects to, and chooses an endpoint. NULL means to
 * leave it to the rules. */
static __always_inline struct endpoint *choose(struct bpf_sock_addr *ctx, struct frontend_key *key, int bound)
{
	struct endpoint *endpoint;
	struct target to;

	if (!look_up(ctx, key, bound, &to))
		return forget(ctx, key->protocol);
	endpoint = random_endpoint(to.range);
	if (!endpoint)
		return forget(ctx, key->protocol);
	if (key->protocol == IPPROTO_UDP || !real_peer) {
		struct peer *peer = connected_of(ctx, BPF_SK_STORAGE_GET_F_CREATE);

		if (!peer) {
			count(NO_MEMORY);
			return NULL;
		}
		remember(peer, key, endpoint, &to);
	}
	count(TRANSLATED);
	return endpoint;
}

/* A search looks for an endpoint among those of a range. */
struct search {
	__be32 addr[WORDS];
	__be16 port;
	__u16 found;
	__u32 first;
};

static long compare(__u32 i, struct search *s)
{
	__u32 index = s->first + i;
	struct endpoint *endpoint = bpf_map_lookup_elem(&endpoints, &index);

	if (!endpoint || endpoint->port != s->port || !equal(endpoint->addr, s->addr))
		return 0;
	s->found = 1;
	return 1; /* the last one */
}

/* is_in is whether the endpoint of a peer is one of a range. With bpf_loop, of Linux 5.17, the verifier checks one
 * turn instead of up to 65,535. */
static __always_inline int is_in(struct peer *peer, __u64 range)
{
	struct search s = {.first = first_of(range), .port = peer->endpoint_port};

#pragma unroll
	for (int w = 0; w < WORDS; w++)
		s.addr[w] = peer->endpoint[w];
	bpf_loop(count_of(range), compare, &s, 0);
	return s.found;
}

static __always_inline int is_vip(struct peer *peer, struct frontend_key *key)
{
	return peer->vip_port == key->port && equal(peer->vip, key->addr);
}

static __always_inline int leads_to(struct peer *peer, const __be32 *addr, __be16 port)
{
	return peer->vip_port && peer->endpoint_port == port && equal(peer->endpoint, addr);
}

/* is_shared is whether the endpoint of a peer is that of another one too: then nobody could tell from which
 * VIP an answer is. */
static __always_inline int is_shared(struct datagrams *d, struct peer *peer)
{
	return leads_to(&d->connected, peer->endpoint, peer->endpoint_port) +
		       leads_to(&d->sent[0], peer->endpoint, peer->endpoint_port) +
		       leads_to(&d->sent[1], peer->endpoint, peer->endpoint_port) >
	       1;
}

/* find_peer returns what a socket remembers of a VIP, or room for it, or NULL. */
static __always_inline struct peer *find_peer(struct datagrams *d, struct frontend_key *key)
{
	if (is_vip(&d->sent[0], key) || !d->sent[0].vip_port)
		return &d->sent[0];
	if (is_vip(&d->sent[1], key) || !d->sent[1].vip_port)
		return &d->sent[1];
	return NULL;
}

/* choose_peer chooses an endpoint for a datagram, the one of the last datagram as long as it can. NULL means
 * to leave it to the rules, as are datagrams to more VIPs than fit. */
static __always_inline struct peer *choose_peer(struct bpf_sock_addr *ctx, struct frontend_key *key, int bound)
{
	struct endpoint *endpoint;
	struct datagrams *d;
	struct target to;
	struct peer *peer;

	if (!look_up(ctx, key, bound, &to))
		return NULL;
	d = bpf_sk_storage_get(&datagrams, ctx->sk, NULL, BPF_SK_STORAGE_GET_F_CREATE);
	if (!d) {
		count(NO_MEMORY);
		return NULL;
	}
	peer = find_peer(d, key);
	if (!peer)
		return NULL;
	if (is_vip(peer, key)) {
		if (!peer->endpoint_port)
			return NULL;
		if (peer->range == to.range)
			return peer;
		if (is_in(peer, to.range)) {
			peer->range = to.range;
			peer->service = to.service;
			return peer;
		}
	}
	endpoint = random_endpoint(to.range);
	if (!endpoint)
		return NULL;
	remember(peer, key, endpoint, &to);
	if (is_shared(d, peer)) {
		peer->endpoint_port = 0; /* for good: two endpoints in turn would confuse the client */
		return NULL;
	}
	count(TRANSLATED);
	return peer;
}

/* protocol_of returns the protocol of a socket if it is translated, otherwise 0. A socket of MPTCP (262)
 * is not; the kernel connects one of TCP for it, which is. */
static __always_inline __u8 protocol_of(struct bpf_sock_addr *ctx)
{
	if (ctx->protocol == IPPROTO_TCP && ctx->type == SOCK_STREAM)
		return IPPROTO_TCP;
	if (translate_udp && ctx->protocol == IPPROTO_UDP && ctx->type == SOCK_DGRAM)
		return IPPROTO_UDP;
	return 0;
}

/* vip_of returns what a socket was connected to, if the address is the endpoint's. */
static __always_inline struct peer *vip_of(struct bpf_sock_addr *ctx, const __be32 *addr)
{
	struct peer *peer = real_peer && ctx->protocol == IPPROTO_UDP ? NULL : connected_of(ctx, 0);

	return peer && leads_to(peer, addr, ctx->user_port) ? peer : NULL;
}

/* sender_of returns the VIP that a datagram is an answer from, if its sender is an endpoint. */
static __always_inline struct peer *sender_of(struct bpf_sock_addr *ctx, const __be32 *addr)
{
	struct datagrams *d = bpf_sk_storage_get(&datagrams, ctx->sk, NULL, 0);

	if (!d)
		return NULL;
	if (leads_to(&d->connected, addr, ctx->user_port))
		return &d->connected;
	if (leads_to(&d->sent[0], addr, ctx->user_port))
		return &d->sent[0];
	return leads_to(&d->sent[1], addr, ctx->user_port) ? &d->sent[1] : NULL;
}

/* Each program reads the address of its system call, and may write another one: one of its own family, or the IPv4
 * address of an IPv6 socket, ::ffff:192.0.2.1. */
enum form { OWN, MAPPED };

/* show_vip is about the peer of a socket, or the sender of a datagram. */
enum whose { PEER, SENDER };

#ifdef IPV6

static __always_inline int read_address(struct bpf_sock_addr *ctx, enum form form, __be32 *addr)
{
	addr[0] = ctx->user_ip6[0];
	addr[1] = ctx->user_ip6[1];
	addr[2] = ctx->user_ip6[2];
	addr[3] = ctx->user_ip6[3];
	return 1;
}

static __always_inline void write_address(struct bpf_sock_addr *ctx, enum form form, const __be32 *addr, __be16 port)
{
	ctx->user_ip6[0] = addr[0];
	ctx->user_ip6[1] = addr[1];
	ctx->user_ip6[2] = addr[2];
	ctx->user_ip6[3] = addr[3];
	ctx->user_port = port;
}

static __always_inline int is_bound(struct bpf_sock_addr *ctx)
{
	return (ctx->sk->src_ip6[0] | ctx->sk->src_ip6[1] | ctx->sk->src_ip6[2] | ctx->sk->src_ip6[3]) != 0;
}

static __always_inline int has_source(struct bpf_sock_addr *ctx)
{
	return (ctx->msg_src_ip6[0] | ctx->msg_src_ip6[1] | ctx->msg_src_ip6[2] | ctx->msg_src_ip6[3]) != 0;
}

#else

/* read_address returns whether the address has the form. */
static __always_inline int read_address(struct bpf_sock_addr *ctx, enum form form, __be32 *addr)
{
	if (form == OWN) {
		addr[0] = ctx->user_ip4;
		return 1;
	}
	if (ctx->user_ip6[0] || ctx->user_ip6[1] || ctx->user_ip6[2] != bpf_htonl(0xffff))
		return 0;
	addr[0] = ctx->user_ip6[3];
	return 1;
}

static __always_inline void write_address(struct bpf_sock_addr *ctx, enum form form, const __be32 *addr, __be16 port)
{
	if (form == OWN)
		ctx->user_ip4 = addr[0];
	else
		ctx->user_ip6[3] = addr[0];
	ctx->user_port = port;
}

/* A socket that is bound to ::ffff:192.0.2.1 has that IPv4 address too. */
static __always_inline int is_bound(struct bpf_sock_addr *ctx) { return ctx->sk->src_ip4 != 0; }

static __always_inline int has_source(struct bpf_sock_addr *ctx) { return ctx->msg_src_ip4 != 0; }

#endif

static __always_inline int translate_connect(struct bpf_sock_addr *ctx, enum form form)
{
	struct frontend_key key = {.port = ctx->user_port, .protocol = protocol_of(ctx)};
	struct endpoint *to;

	if (!key.protocol)
		return 1;
	if (!read_address(ctx, form, key.addr)) {
		forget(ctx, key.protocol);
		return 1;
	}
	to = choose(ctx, &key, is_bound(ctx));
	if (to)
		write_address(ctx, form, to->addr, to->port);
	return 1;
}

static __always_inline int translate_send(struct bpf_sock_addr *ctx)
{
	struct frontend_key key = {.port = ctx->user_port, .protocol = protocol_of(ctx)};
	struct peer *to;

	if (!key.protocol)
		return 1;
	read_address(ctx, OWN, key.addr);
	to = choose_peer(ctx, &key, is_bound(ctx) || has_source(ctx));
	if (to)
		write_address(ctx, OWN, to->endpoint, to->endpoint_port);
	return 1;
}

/* show_vip writes the VIP instead of the endpoint. */
static __always_inline int show_vip(struct bpf_sock_addr *ctx, enum form form, enum whose whose)
{
	struct peer *peer;
	__be32 addr[WORDS];

	if (!read_address(ctx, form, addr))
		return 1;
	peer = whose == SENDER ? sender_of(ctx, addr) : vip_of(ctx, addr);
	if (peer)
		write_address(ctx, form, peer->vip, peer->vip_port);
	return 1;
}

#ifdef IPV6

SEC("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx) { return translate_connect(ctx, OWN); }

SEC("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx) { return translate_send(ctx); }

SEC("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx) { return show_vip(ctx, OWN, PEER); }

SEC("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx) { return show_vip(ctx, OWN, SENDER); }

#else

SEC("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx) { return translate_connect(ctx, OWN); }

/* The kernel also asks it for a datagram of an IPv6 socket to ::ffff:192.0.2.1. */
SEC("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx) { return translate_send(ctx); }

SEC("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx) { return show_vip(ctx, OWN, PEER); }

SEC("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx) { return show_vip(ctx, OWN, SENDER); }

SEC("cgroup/connect6")
int connect_mapped(struct bpf_sock_addr *ctx) { return translate_connect(ctx, MAPPED); }

SEC("cgroup/getpeername6")
int getpeername_mapped(struct bpf_sock_addr *ctx) { return show_vip(ctx, MAPPED, PEER); }

SEC("cgroup/recvmsg6")
int recvmsg_mapped(struct bpf_sock_addr *ctx) { return show_vip(ctx, MAPPED, SENDER); }

#endif

char licenses[] SEC("license") = "Dual MIT/GPL";
