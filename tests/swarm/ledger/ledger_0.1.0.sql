BEGIN TRANSACTION;
CREATE TABLE chain (
	number BIGINT NOT NULL, 
	previous VARCHAR(64) NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	PRIMARY KEY (number), 
	FOREIGN KEY(number) REFERENCES updates (number), 
	UNIQUE (previous)
);
INSERT INTO "chain" VALUES(1,'0000000000000000000000000000000000000000000000000000000000000000','3394131b16b0b6ac88ee2ed4a988a41c844bf873f3219d57dd0ba8519c11b60a');
INSERT INTO "chain" VALUES(2,'3394131b16b0b6ac88ee2ed4a988a41c844bf873f3219d57dd0ba8519c11b60a','4775c2fab2ab4d742ad10ab2e6b2c1f9c21e2b0805e695f82e57ae6726f7f7dd');
INSERT INTO "chain" VALUES(3,'4775c2fab2ab4d742ad10ab2e6b2c1f9c21e2b0805e695f82e57ae6726f7f7dd','292ea6e69ef12068fe77b53a616c2fdbbb625d8a22680691e578f2180572ee95');
CREATE TABLE coordinator_keys (
	public_key VARCHAR(64) NOT NULL, 
	added_s DOUBLE NOT NULL, 
	PRIMARY KEY (public_key)
);
INSERT INTO "coordinator_keys" VALUES('a94243cf633f887cdb31bb53d3b8ed9653b8f60251386bb7b956d7823a79fa42',1000.0);
CREATE TABLE evaluation_leases (
	number INTEGER NOT NULL, 
	worker VARCHAR(128) NOT NULL, 
	versions JSON NOT NULL, 
	granted_s DOUBLE NOT NULL, 
	deadline_s DOUBLE NOT NULL, 
	PRIMARY KEY (number), 
	FOREIGN KEY(worker) REFERENCES workers (id)
);
INSERT INTO "evaluation_leases" VALUES(1,'c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f','{"0": 1, "1": 0}',1015.0,1100.0);
CREATE TABLE evaluations (
	number INTEGER NOT NULL, 
	lease BIGINT NOT NULL, 
	split VARCHAR(32) NOT NULL, 
	scores JSON NOT NULL, 
	combine JSON NOT NULL, 
	at_s DOUBLE NOT NULL, 
	PRIMARY KEY (number), 
	UNIQUE (lease, split), 
	FOREIGN KEY(lease) REFERENCES evaluation_leases (number)
);
CREATE TABLE events (
	number INTEGER NOT NULL, 
	at_s DOUBLE NOT NULL, 
	kind VARCHAR(64) NOT NULL, 
	text TEXT NOT NULL, 
	data JSON NOT NULL, 
	PRIMARY KEY (number)
);
INSERT INTO "events" VALUES(1,1000.0,'joined','Silver Finch e2, cpu','{"worker": "83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2"}');
INSERT INTO "events" VALUES(2,1000.0,'joined','Silver Seal 07, cpu','{"worker": "c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f"}');
INSERT INTO "events" VALUES(3,1000.0,'merged','phase 1, round 0: all leases are in: 2 updates in','{"phase": 0, "round": 0, "updates": 2}');
INSERT INTO "events" VALUES(4,1010.0,'merged','phase 1, round 1: all leases are in: 1 update in','{"phase": 0, "round": 1, "updates": 1}');
INSERT INTO "events" VALUES(5,1002.0,'paused','by an admin','{}');
CREATE TABLE leases (
	id VARCHAR(200) NOT NULL, 
	phase INTEGER NOT NULL, 
	round INTEGER NOT NULL, 
	shard INTEGER NOT NULL, 
	worker VARCHAR(128) NOT NULL, 
	step_start BIGINT NOT NULL, 
	steps BIGINT NOT NULL, 
	granted_s DOUBLE NOT NULL, 
	due_s DOUBLE NOT NULL, 
	deadline_s DOUBLE NOT NULL, 
	state VARCHAR(16) NOT NULL, 
	PRIMARY KEY (id), 
	FOREIGN KEY(phase, round) REFERENCES rounds (phase, number), 
	UNIQUE (phase, round, worker), 
	CHECK (state IN ('open', 'reported', 'expired', 'released')), 
	FOREIGN KEY(worker) REFERENCES workers (id)
);
INSERT INTO "leases" VALUES('0-0-83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2',0,0,0,'83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2',0,2,1000.0,1720.0,1900.0,'reported');
INSERT INTO "leases" VALUES('0-0-c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f',0,0,1,'c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f',0,2,1000.0,1720.0,1900.0,'reported');
INSERT INTO "leases" VALUES('0-1-83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2',0,1,0,'83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2',2,2,1010.0,1010.001,1910.0,'reported');
CREATE TABLE phases (
	phase INTEGER NOT NULL, 
	step BIGINT NOT NULL, 
	finished BOOLEAN NOT NULL, 
	PRIMARY KEY (phase)
);
INSERT INTO "phases" VALUES(0,4,0);
CREATE TABLE rounds (
	phase INTEGER NOT NULL, 
	number INTEGER NOT NULL, 
	base JSON NOT NULL, 
	step_start BIGINT NOT NULL, 
	steps BIGINT NOT NULL, 
	opened_s DOUBLE NOT NULL, 
	limit_s DOUBLE NOT NULL, 
	deadline_s DOUBLE NOT NULL, 
	extensions INTEGER NOT NULL, 
	closed_s DOUBLE, 
	reason TEXT NOT NULL, 
	mark VARCHAR(32) NOT NULL, 
	PRIMARY KEY (phase, number), 
	FOREIGN KEY(phase) REFERENCES phases (phase)
);
INSERT INTO "rounds" VALUES(0,0,'{"0": 0, "1": 0}',0,2,1000.0,900.0,1900.0,0,1000.0,'all leases are in: 2 updates in','86fd62043cd24497');
INSERT INTO "rounds" VALUES(0,1,'{"0": 1, "1": 1}',2,2,1000.0,900.0,1910.0,0,1010.0,'all leases are in: 1 update in','87fd15d4b6222a08');
INSERT INTO "rounds" VALUES(0,2,'{"0": 2, "1": 2}',4,2,1010.0,900.0,1910.0,0,NULL,'open','20fc655af2c6a8e4');
CREATE TABLE run (
	id INTEGER NOT NULL CHECK (id = 1), 
	spec TEXT NOT NULL, 
	spec_sha256 VARCHAR(64) NOT NULL, 
	corpus_sha256 VARCHAR(64) NOT NULL, 
	corpus JSON NOT NULL, 
	protocol INTEGER NOT NULL, 
	paused BOOLEAN NOT NULL, 
	created_s DOUBLE NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "run" VALUES(1,'{"name":"tiny","seed":0,"corpus":{"source":"text.txt","valid_share":0.05,"test_share":0.05},"model":{"width":32,"heads":2,"context":64,"blocks":4,"layers":4},"objective":{"kind":"stacked","schedule":"progressive","scaffold":1,"later_share":0.25,"lookahead":0,"own_weight":0.1,"refresh_steps":1,"state_dropout":0.0},"optim":{"muon_lr":0.02,"muon_momentum":0.95,"adam_lr":0.004,"adam_betas":[0.9,0.98],"clip_norm":1.0,"warmup_steps":5,"decay_share":0.5},"train":{"steps":40,"windows":8},"swarm":{"round_steps":2,"min_updates":1,"deadline_floor_s":10.0,"deadline_ceiling_s":900.0,"deadline_spreads":6.0,"max_lag":1,"staleness_exponent":0.5,"averaging":"mean","trim_share":0.2,"clip_factor":2.0,"outer":"plain","outer_lr":null,"outer_momentum":0.9,"max_norm_factor":20.0,"keep_versions":8,"update":"fp32","update_ratio":100.0,"download":"int6","evaluate_every":1000}}','f565f514a7141e75d224f2403bc0ab7df2c42c4bc6af2bce40e7790918bdacab','322d306fab83476748c62ab6fd51042d1d86c7f1515c40dcb62c585430e916b1','{"train": "1c5158adb28352b7d0404febae3d87f18aae354df6b0bd5bb58b2ba0e2879c5b", "valid": "a843cac230278159a24b01afa33b66971c4447d9693d918ed7f87c7fb9908737", "test": "8805440084143727192b854c1f3f93805973b702ce2abf7701b3e63a36bd4630"}',3,1,0.0);
CREATE TABLE tokens (
	number INTEGER NOT NULL, 
	name TEXT NOT NULL, 
	role VARCHAR(16) NOT NULL CHECK (role IN ('admin', 'worker', 'viewer')), 
	sha256 VARCHAR(64) NOT NULL, 
	created_s DOUBLE NOT NULL, 
	revoked_s DOUBLE, 
	PRIMARY KEY (number), 
	UNIQUE (sha256)
);
INSERT INTO "tokens" VALUES(1,'admin','admin','e511cd7fb485193db440d78c0917db3460eb9e9c13fc0a804f5583744a5d4507',0.0,NULL);
INSERT INTO "tokens" VALUES(2,'worker','worker','772dae8b2d32e8005711de42256c225edccb4c71e9e16bc96f9cef4300d8fb8d',0.0,NULL);
INSERT INTO "tokens" VALUES(3,'viewer','viewer','716aeb596236fa4e1dd6cfa09b4443183b2b5a9c41e5a313b84b25cb1f64f553',0.0,1001.0);
CREATE TABLE track_records (
	worker VARCHAR(128) NOT NULL, 
	delivered BIGINT NOT NULL, 
	owed BIGINT NOT NULL, 
	steps_per_s DOUBLE, 
	PRIMARY KEY (worker), 
	FOREIGN KEY(worker) REFERENCES workers (id)
);
INSERT INTO "track_records" VALUES('83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2',2,0,2000.0);
INSERT INTO "track_records" VALUES('c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f',1,0,2000.0);
CREATE TABLE updates (
	number INTEGER NOT NULL, 
	id VARCHAR(64) NOT NULL, 
	lease VARCHAR(200) NOT NULL, 
	worker VARCHAR(128) NOT NULL, 
	phase INTEGER NOT NULL, 
	base JSON NOT NULL, 
	tokens BIGINT NOT NULL, 
	steps BIGINT NOT NULL, 
	codec VARCHAR(32) NOT NULL, 
	num_bytes BIGINT NOT NULL, 
	norm DOUBLE NOT NULL, 
	lag INTEGER NOT NULL, 
	weight DOUBLE NOT NULL, 
	loss DOUBLE NOT NULL, 
	received_s DOUBLE NOT NULL, 
	refused TEXT, 
	signature VARCHAR(256) NOT NULL, 
	merged_phase INTEGER, 
	merged_round INTEGER, 
	PRIMARY KEY (number), 
	FOREIGN KEY(merged_phase, merged_round) REFERENCES rounds (phase, number), 
	CHECK (refused IS NULL OR merged_round IS NULL), 
	UNIQUE (id), 
	FOREIGN KEY(lease) REFERENCES leases (id), 
	FOREIGN KEY(worker) REFERENCES workers (id), 
	FOREIGN KEY(phase) REFERENCES phases (phase)
);
INSERT INTO "updates" VALUES(1,'41197f8f883dabad552da32149ce618d80745e002c200b3cddd73b64cd9a3d2a','0-0-83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2','83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2',0,'{"0": 0, "1": 0}',1024,2,'fp32',229784,1.69422657975539237007e-01,0,1024.0,5.0,1000.0,NULL,'5770d5421853c171370d030317580714bb6ae417de5b6f161c1423d6e0ac360665f1b386869b7d000134df22085824bc261dbad08936c09a4bc933841d20260c',0,0);
INSERT INTO "updates" VALUES(2,'4c0ece0a626aa3003e92bd216347224dd06f891371df1bc4c12de2bd6486e0c2','0-0-c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f','c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f',0,'{"0": 0, "1": 0}',1024,2,'fp32',229784,3.38844711318661950816e-01,0,1024.0,5.0,1000.0,NULL,'19465a4247ecae785bf433cc57386dc5758486e6c056e76d1255b2de2fd3cac6b72a719143d1fe46bd7fcad54ecd3fb6786caf8cc2f587d8e79365a9013c6406',0,0);
INSERT INTO "updates" VALUES(3,'4ec9be1e873385b85aa4f06f126592b018a3cb3340b021254ccee14b8ac20f36','0-1-83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2','83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2',0,'{"0": 1, "1": 1}',1024,2,'fp32',229784,1.6942266719959747645e-01,0,1024.0,5.0,1010.0,NULL,'393b3b7b154363f52dfe9146f63b8bf9584462c452b0d81160bf637bf74a36bbbe956c002f9f92bf541eb4563bc746f05e9c90c3d97269e3501babf43ff1e208',0,1);
CREATE TABLE versions (
	block INTEGER NOT NULL, 
	version INTEGER NOT NULL, 
	sha256 VARCHAR(64) NOT NULL, 
	momentum_sha256 VARCHAR(64), 
	difference_sha256 VARCHAR(64), 
	phase INTEGER, 
	round INTEGER, 
	parent INTEGER, 
	created_s DOUBLE NOT NULL, 
	PRIMARY KEY (block, version), 
	CHECK ((version = 0 AND parent IS NULL) OR (version > 0 AND parent = version - 1)), 
	FOREIGN KEY(phase, round) REFERENCES rounds (phase, number), 
	FOREIGN KEY(block, parent) REFERENCES versions (block, version)
);
INSERT INTO "versions" VALUES(0,0,'21268b7cf075dd8fcd15d774b90e81f9a899e997cbfc8326dc5a63ada90f4115',NULL,NULL,NULL,NULL,NULL,1000.0);
INSERT INTO "versions" VALUES(1,0,'388037aa109f9e748a26461fc3f12f1c5206842ba389fd207e9d290078164840',NULL,NULL,NULL,NULL,NULL,1000.0);
INSERT INTO "versions" VALUES(0,1,'5e5913d981c08e7ba5f34017bf07c70bf182520e0406b253c9aaa3f5116edb8d',NULL,'b3086f6dc10f070b61d6a5e28e62b20b3255a124dc1eb1d9892315bcc361f8f7',0,0,0,1000.0);
INSERT INTO "versions" VALUES(1,1,'ab41f42e81915ff4a8e194d1495f8ab1a82eb5b90c4adb7fd53bfdd1d85b12c5',NULL,'b3086f6dc10f070b61d6a5e28e62b20b3255a124dc1eb1d9892315bcc361f8f7',0,0,0,1000.0);
INSERT INTO "versions" VALUES(0,2,'473972c267c6c8259a27886694895f065c2628f3a09ed939e59cdd834f716c0b',NULL,'33d4d0405b5cfa5a91369b9af2e9f7e24e26dbc76ecd09de6eba84a6694931df',0,1,1,1010.0);
INSERT INTO "versions" VALUES(1,2,'a0ef1c7e322497803145329271e22cac3890a7ff89d4a3b5ec9302760b07a9b4',NULL,'33d4d0405b5cfa5a91369b9af2e9f7e24e26dbc76ecd09de6eba84a6694931df',0,1,1,1010.0);
CREATE TABLE workers (
	id VARCHAR(128) NOT NULL, 
	name TEXT NOT NULL, 
	device TEXT NOT NULL, 
	memory_bytes BIGINT NOT NULL, 
	steps_per_s DOUBLE NOT NULL, 
	nonce BIGINT NOT NULL, 
	first_seen_s DOUBLE NOT NULL, 
	last_seen_s DOUBLE NOT NULL, 
	PRIMARY KEY (id)
);
INSERT INTO "workers" VALUES('83e49f0889001601c3a26e255cc568ba72922aebf8c7c223edb0bd1feba400e2','w','cpu',8589934592,1.0,2,1000.0,1010.0);
INSERT INTO "workers" VALUES('c5b70a6980c164bfbfa2ad978962866abeb30e439fd21477e86ad9956a7d410f','w','cpu',8589934592,1.0,1,1000.0,1000.0);
CREATE UNIQUE INDEX one_token_a_name ON tokens (name) WHERE revoked_s IS NULL;
CREATE UNIQUE INDEX one_open_round_a_phase ON rounds (phase) WHERE closed_s IS NULL;
CREATE INDEX updates_by_worker ON updates (worker);
CREATE UNIQUE INDEX one_update_a_lease ON updates (lease) WHERE refused IS NULL;
CREATE INDEX updates_by_phase ON updates (phase, merged_round);
COMMIT;
